"""Other users of a module's output: operations in a container's own forward, beside the modules that take it.

# Note [Beside]
The gradient of a value is the sum of the gradients from all its users. Modules that use it are
recorded. Operations in a container's own forward are not; only their results show: an input of a
module that no module returned, or an output of the container that no module inside it returned. A
value is available in the forward of the container in which it was returned; further out only if
that container returns it unchanged; and in containers that take it as input. So for `b(h) + f(h)`
both `b` and `f` can have spoiled the gradient of `h`, unless b is a sum of products, such as a
linear map, and all its numbers are far too small to leave the range of their format. Values that a
program passes by other ways than a return, such as an attribute, do not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kedge.rules.recorded.wiring import ModuleSites, Wiring


def operations_beside(
    wiring: Wiring, module: ModuleSites, consumers: Iterable[ModuleSites]
) -> list[ModuleSites]:
    """Return the containers in whose own forward an operation may take a module's output; see Note [Beside]."""
    given = (
        h for c in consumers for h in wiring.ancestors(c) if not h.sources.isdisjoint(module.outs)
    )
    reached = dict.fromkeys(h.path for h in (*_reached_by(wiring, module), *given))
    return [h for path in reached if _operates(wiring, h := wiring.modules[path], module)]


def uses_outside(wiring: Wiring, module: ModuleSites) -> bool:
    """Whether an operation outside of all watched containers may take a module's output."""
    if wiring.ancestors(module):
        return False
    later = (m for m in wiring if m.root == module.root and wiring.start(m) > module.position)
    return any(None in m.sources for m in later if not wiring.ancestors(m))


def _reached_by(wiring: Wiring, module: ModuleSites) -> Iterator[ModuleSites]:
    """Yield the containers around a module, from the inside, as far as they return its output unchanged."""
    for holder in wiring.ancestors(module):
        yield holder
        if not _returns_output_of(wiring, holder, module):
            return


def _returns_output_of(wiring: Wiring, holder: ModuleSites, module: ModuleSites) -> bool:
    """Whether a container returned a module's output unchanged."""
    inner = wiring.returned(holder)
    while inner is not None and inner is not module:
        inner = wiring.returned(inner)
    return inner is not None


def _operates(wiring: Wiring, holder: ModuleSites, module: ModuleSites) -> bool:
    """Whether an operation of a container's own forward can have used a module's output."""
    if not wiring.inside(holder):
        return False
    later = (m for m in wiring.inside(holder) if wiring.start(m) > module.position)
    return wiring.returned(holder) is None or any(_computed(wiring, holder, m) for m in later)


def _computed(wiring: Wiring, holder: ModuleSites, module: ModuleSites) -> bool:
    """Whether a container's own forward computed an input of a module inside it."""
    if None not in module.sources or wiring.ancestors(module)[0] is not holder:
        return False
    if not wiring.has_nodes:
        return True
    foreign = [wiring.sites[site] for site in module.ins if None in wiring.sites[site].sources]
    given = {wiring.sites[site].node for site in holder.ins if None in wiring.sites[site].sources}
    # Of several input values only the first one's node is recorded, so that of the unknown one is
    # not known.
    return any(
        len(site.sources) > 1 or (site.node is not None and site.node not in given)
        for site in foreign
    )
