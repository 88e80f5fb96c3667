"""Graphs of the device, such as those of CUDA: work that is captured once and replayed without Python.

# Note [Captured work]
During a capture no operation runs: it is only added to the graph. A synchronisation would end the
capture with an error, memory that is allocated belongs to the graph, and a copy to the host would
be replayed into memory that is long gone. A replay calls no hook, so nothing would read what was
measured in it. So Kedge leaves captured work alone, and says so once.
"""

from __future__ import annotations

from kedge.stderr import say
from kedge.torch_internals import accelerators

LEFT_ALONE = (
    "a graph of the device is being captured (CUDA graphs, make_graphed_callables): "
    "what runs in it is not measured, because its replays call no hooks; "
    "to measure it, run these steps without the graph"
)
_said: list[str] = []


def leaves_alone() -> bool:
    """Whether work is being captured, which Kedge leaves alone; see Note [Captured work]."""
    if not accelerators.is_capturing():
        return False
    if not _said:
        _said.append(LEFT_ALONE)
        say(LEFT_ALONE)
    return True
