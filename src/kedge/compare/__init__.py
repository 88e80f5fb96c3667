"""Two recordings compared.

Of two runs that should be equal: the sites that they share, their first difference, its size and its
cause. Of a good run and another one: what held there and does not hold here.
"""

from kedge.compare.against.departures import departures

__all__ = ["departures"]
