"""Two recordings compared: the sites that they share, their first difference, its size and its cause.

Of a good run and another one it is what held there and does not hold here, which needs no equal
values.
"""

from kedge.compare.against.departures import departures

__all__ = ["departures"]
