"""Relations of the model: its layers, their dtypes, and the operations between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kedge.compare.against.run_pair import LEAST_STEPS, Departure, RunPair, steps_of
from kedge.compare.alignment.modules import RecordedModule
from kedge.compare.alignment.sites import SameModule, SameSite
from kedge.compare.wording import change_between, names_of_modules
from kedge.rules.recorded.optimizers import events_of
from kedge.short_text import counted, listed
from kedge.sites.folding import folded_names
from kedge.store.events import DropoutsEvent, LossGraphEvent
from kedge.store.recording import Recording

#: A site that fires in so many of the steps fires in each.
EACH = 0.95
#: The most names in a sentence.
NAMED = 3


def modules(pair: RunPair) -> Iterator[Departure]:
    """The layers: those that are gone or were never called, those with other parameters, new ones."""
    gone = [
        module
        for module in pair.alignment.only_a
        if module.fires and _first_step(pair.good, module) <= pair.last_step
    ]
    known = {module["path"] for root in pair.run.roots for module in root.modules}
    uncalled = [module for module in gone if module.path in known]
    if pair.measures_alike:
        uncalled += [
            same.b
            for same in pair.alignment.modules
            if same.a.fires
            and not same.b.fires
            and _first_step(pair.good, same.a) <= pair.last_step
        ]
    missing = [module for module in gone if module.path not in known]
    changed = [same for same in pair.alignment.modules if not same.kept]
    if uncalled:
        yield _layers(
            pair,
            uncalled,
            f"{names_of_modules(uncalled)}: called in the good run, and never here.",
            "called",
            "never called",
        )
    if missing:
        yield _layers(
            pair,
            missing,
            f"{names_of_modules(missing)}: in the model of the good run, and not in this one.",
            "in the model",
            "not in the model",
        )
    if changed:
        changes = [_change(same) for same in changed]
        yield _layers(
            pair,
            [same.b for same in changed],
            f"layers are changed: {listed(changes, NAMED)}.",
            "as they were made",
            "changed",
        )
    added = [module for module in pair.alignment.only_b if module.fires]
    if added and not gone:
        yield _layers(
            pair,
            added,
            f"{names_of_modules(added)}: called here, and not in the good run.",
            "not called",
            "called",
        )


def _layers(
    pair: RunPair, found: Sequence[RecordedModule], message: str, good: str, here: str
) -> Departure:
    return Departure(
        kind="layers",
        site=found[0].sites[0].site,
        step=int(pair.run.steps[0]),
        message=message,
        good=good,
        here=here,
        paths=tuple(module.path for module in found),
        remedy="If this is not what you changed, look where the model is made and called.",
    )


def _change(same: SameModule) -> str:
    """Return the difference of two modules in the words of a good run and another one."""
    change = change_between(same.a, same.b)
    return change.replace(" in A", " in the good run", 1).removesuffix(" in B") + " here"


def _first_step(recording: Recording, module: RecordedModule) -> int:
    """Return the first step in which a module fired."""
    firsts = [recording.rows(site).step[:1].tolist() for site in module.sites]
    return min((first for one in firsts for first in one), default=0)


def dtypes(pair: RunPair) -> Iterator[Departure]:
    """The dtypes of parameters, outputs and gradients."""
    found: dict[tuple[str, str], list[SameSite]] = {}
    for same in pair.alignment.sites:
        if same.a.dtype != same.b.dtype:
            found.setdefault((same.a.dtype, same.b.dtype), []).append(same)
    for (good, here), sites in found.items():
        first = sites[0]
        step = int(pair.run.rows(first.b).step[0])
        number = counted(len(sites), "site")
        yield Departure(
            kind="dtype",
            site=first.b.site,
            step=step,
            message=f"{number} had {good} in the good run and {_have(len(sites))} {here} here, "
            f"first {first.b.site}.",
            good=good,
            here=here,
            paths=tuple(same.b.site for same in sites),
            remedy="Look for a cast, autocast or a default dtype that is new or gone.",
        )


def _have(number: int) -> str:
    return "has" if number == 1 else "have"


def operations(pair: RunPair) -> Iterator[Departure]:
    """The operations that make the inputs and outputs of modules."""
    for same in pair.of_kind("in", "out"):
        good = same.a.node
        here = same.b.node
        if good is None or here is None or plain_node(good) == plain_node(here):
            continue
        if same.a.type != same.b.type or not same.module.leaf:
            continue
        yield Departure(
            kind="operations",
            site=same.b.site,
            step=int(pair.run.rows(same.b).step[0]),
            message=f"{same.b.site} was made by {plain_node(good)} in the good run, "
            f"and is made by {plain_node(here)} here.",
            good=good,
            here=here,
            paths=(same.b.site,),
            remedy="Look what the forward computes before this place.",
        )
        return  # those after it follow from it


def plain_node(node: str) -> str:
    """Return the name of an autograd node without its number."""
    return node.rstrip("0123456789").removesuffix("Backward")


def losses(pair: RunPair) -> Iterator[Departure]:
    """The operations that make the loss."""
    graphs = {event.site: event for event in events_of(pair.run, LossGraphEvent)}
    for good in events_of(pair.good, LossGraphEvent):
        here = graphs.get(good.site)
        if here is None or not good.nodes or not here.nodes:
            continue
        before = _operations(good)
        after = _operations(here)
        both = min(len(before), len(after))  # behind what is frozen there is no graph to follow
        if before[:both] != after[:both]:
            yield Departure(
                kind="loss",
                site=good.site,
                step=here.step or 0,
                message=f"{good.site} was computed by {_chain(before, after)} in the good run, "
                f"and is by {_chain(after, before)} here.",
                good=" of ".join(before),
                here=" of ".join(after),
                remedy="Look where the loss is computed, and at what the model returns to it.",
            )
        elif good.ascends != here.ascends:
            directions = {True: "large", False: "small"}
            yield Departure(
                kind="loss",
                site=good.site,
                step=here.step or 0,
                message=f"the good run made {good.site} {directions[good.ascends]}; here it is "
                f"made {directions[here.ascends]}.",
                good=directions[good.ascends],
                here=directions[here.ascends],
                remedy="Look at the sign of the loss.",
            )


def _operations(graph: LossGraphEvent) -> tuple[str, ...]:
    """Return the operations that made a loss, the last one first, without the parameter at their end."""
    names = tuple(map(plain_node, graph.nodes))
    return names[:-1] if names[-1].endswith("AccumulateGrad") else names


def _chain(nodes: tuple[str, ...], others: tuple[str, ...]) -> str:
    """Return the first operations of a loss, up to the first that is not the same in both."""
    same = 0
    for node, other in zip(nodes, others, strict=False):
        if node != other:
            break
        same += 1
    return " of ".join(nodes[: same + 1])


def dropouts(pair: RunPair) -> Iterator[Departure]:
    """The dropouts behind a loss, and the shares that they keep."""
    known = {event.site: event for event in events_of(pair.run, DropoutsEvent)}
    for good in {event.site: event for event in events_of(pair.good, DropoutsEvent)}.values():
        here = known.get(good.site)
        if here is None:
            continue
        before = sorted(each.kept for each in good.dropouts)
        after = sorted(each.kept for each in here.dropouts)
        if before != after:
            yield Departure(
                kind="dropout",
                site=good.site,
                step=here.step,
                message=f"the dropouts behind {good.site} kept {_shares(before)} in the good run, "
                f"and keep {_shares(after)} here.",
                good=_shares(before),
                here=_shares(after),
                remedy="Look at the rates of the dropouts.",
            )


def _shares(kept: list[float]) -> str:
    return listed([f"{share:.3g}" for share in kept]) or "all"


def firing(pair: RunPair) -> Iterator[Departure]:
    """The sites that fire in each step, and those among them that fire in none here."""
    silent = []
    alone = {id(site) for site in pair.alignment.sites_a}
    uncalled = {same.a.path for same in pair.alignment.modules if not same.b.fires}
    others = {id(same.a): same.b for same in pair.alignment.sites}
    for site in pair.good.sites:
        if site.kind not in ("out.grad", "param.grad") and not site.kind.startswith("in"):
            continue
        steps = steps_of(pair.good, site)
        since = pair.good.steps[pair.good.steps >= steps[0]] if len(steps) else steps
        if len(steps) < LEAST_STEPS or len(steps) < EACH * len(since):
            continue
        if int(steps[0]) > pair.last_step or site.owner in uncalled:
            continue
        other = others.get(id(site))
        if id(site) in alone or (other is not None and not len(pair.run.rows(other))):
            silent.append(site)
    by_kind: dict[str, list[str]] = {}
    for site in silent:
        by_kind.setdefault(site.kind, []).append(site.site)
    if not pair.measures_alike:
        return
    for kind, sites in by_kind.items():
        names = listed(folded_names(sites), NAMED)
        yield Departure(
            kind="firing",
            site=sites[0],
            step=int(pair.run.steps[0]),
            message=f"{names} had values in each measured step of the good run, and in none of "
            f"{len(pair.run.steps)} here ({kind}).",
            good="in each measured step",
            here="in none",
            paths=tuple(sites),
            remedy="kedge report names sites that never fired, and why.",
        )
