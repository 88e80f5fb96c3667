"""Two recordings compared: the sites that they share, their first difference, its size and its cause.

Of a good run and another one it is what held there and does not hold here, which needs no equal
values.
"""

from kedge.calls.called_package import refuse_calls
from kedge.compare.against.departures import departures

__all__ = ["departures"]

refuse_calls(
    "kedge.compare",
    "kedge diff A B in a terminal says where two runs begin to differ, and "
    "kedge.compare.departures(recording, good) what held in a good run and does not hold in another",
)
