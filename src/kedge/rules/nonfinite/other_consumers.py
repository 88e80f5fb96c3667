"""Who else takes a module's output: operations in a container's own forward, beside the modules that take it.

# Note [Beside]
The gradient of a value is the sum of what comes back from everything that takes it. Of modules it is recorded that they
do; of an operation in a container's own forward, which a recording does not list, what it leads to shows: an input of a
module that no module returned, or an output of the container that no module inside it returned. A value is at hand where it was
returned, in the forward of the container around; further out only where that container returns it as it is; and in
containers that were given it. So `b(h) + f(h)` leaves two that can have spoiled the gradient of `h`, `b` and `f`, unless b is
a sum of products, such as a linear map, and all its numbers are far too small to leave the range of their format. What a
program takes past what is returned, as out of an attribute, does not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kedge.rules.wiring import Module, Wiring


def beside(wiring: Wiring, module: Module, consumers: Iterable[Module]) -> list[Module]:
    """List the containers in whose own forward an operation may take a module's output, as others do; see Note [Beside]."""
    given = (h for c in consumers for h in wiring.ancestors(c) if not h.sources.isdisjoint(module.outs))
    having = dict.fromkeys(h.path for h in (*_having(wiring, module), *given))
    return [h for path in having if _operates(wiring, h := wiring.modules[path], module)]


def uses_outside(wiring: Wiring, module: Module) -> bool:
    """Tell whether something that no watched container holds may take a module's output."""
    if wiring.ancestors(module):
        return False
    later = (m for m in wiring if m.root == module.root and wiring.start(m) > module.position)
    return any(None in m.sources for m in later if not wiring.ancestors(m))


def _having(wiring: Wiring, module: Module) -> Iterator[Module]:
    """Follow a value outwards, from the container in which a module returned it, as far as it is returned as it is."""
    for holder in wiring.ancestors(module):
        yield holder
        if not _hands_out(wiring, holder, module):
            return


def _hands_out(wiring: Wiring, holder: Module, module: Module) -> bool:
    """Tell whether what a container returned is a module's output, as it is."""
    inner = wiring.returned(holder)
    while inner is not None and inner is not module:
        inner = wiring.returned(inner)
    return inner is not None


def _operates(wiring: Wiring, holder: Module, module: Module) -> bool:
    """Tell whether an operation of a container's own forward can have come after a module's output."""
    if not wiring.inside(holder):
        return False
    later = (m for m in wiring.inside(holder) if wiring.start(m) > module.position)
    return wiring.returned(holder) is None or any(_computed(wiring, holder, m) for m in later)


def _computed(wiring: Wiring, holder: Module, module: Module) -> bool:
    """Tell whether a container's own forward computed something that a module inside it takes."""
    if None not in module.sources or wiring.ancestors(module)[0] is not holder:
        return False
    if not wiring.has_nodes:
        return True
    foreign = [wiring.sites[site] for site in module.ins if None in wiring.sites[site].sources]
    given = {wiring.sites[site].node for site in holder.ins if None in wiring.sites[site].sources}
    # Of several values that came in, the node is the first one's: that of the unknown one is not told.
    return any(len(site.sources) > 1 or (site.node is not None and site.node not in given) for site in foreign)
