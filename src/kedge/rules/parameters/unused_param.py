"""UNUSED-PARAM: trainable parameters that nothing trains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kedge.rules.evidence import Evidence, said, unsaid
from kedge.rules.naming import NAMED
from kedge.rules.recorded.gradient_paths import Given, GradientPaths, PathEnd
from kedge.rules.recorded.ledger import path_of, remedy_of, uncalled, unreached
from kedge.rules.recorded.optimizers import events_of, optimizers, trains_in_vain
from kedge.rules.recorded.roots import by_root, root_of, root_path, within
from kedge.rules.recorded.samples import no_end
from kedge.rules.recorded.trained import trained_sites
from kedge.rules.rule import Finding, Lack, Rule, Severity
from kedge.short_text import counted, listed
from kedge.sites.site import escape, unescape
from kedge.store.events import LedgerLine, NoWayBackEvent
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL


@dataclass(frozen=True, kw_only=True)
class UnusedParamEvidence(Evidence):
    """Parameters that nothing trains, and why.

    Attributes:
        of: How many parameters of the model got gradients, where optimizers lack some of them.
        again: More places with the same cause.
    """

    sites: Sequence[str] = said("sites {}")
    cause: str = said("{}")
    of: int | None = said("of {} in all", unless=None)
    again: Sequence[str] = said("again: {}", unless=())


@dataclass(frozen=True, kw_only=True)
class CutPathEvidence(Evidence):
    """Parameters before the end of a path from the loss, and where that ends.

    Attributes:
        last: The last module without a gradient.
        next: The next module with one; None without one.
        given: What the module after the last one was given: a value with a graph, an input of the
            model, others without a graph, or whole numbers alone; None if that is not known.
        again: More places where a path ends so.
    """

    sites: Sequence[str] = said("sites {}")
    cause: str = said("{}")
    last: str = said("at last {}")
    next: str | None = said("next: {}")
    given: Given | None = unsaid(unless=None)
    again: Sequence[str] = said("again: {}", unless=())


@dataclass(frozen=True, kw_only=True)
class NoWayBackEvidence(Evidence):
    """An output from which no gradient comes back to the module's input, and the losses from which one does."""

    output: str = unsaid()
    through: Sequence[str] = unsaid()


@dataclass(frozen=True)
class UnusedParam(Rule):
    """A parameter requires a gradient but gets none, or is in no optimizer.

    Meaning:
        It keeps its first value through the whole run. Either no loss depends on it, or it was not
        passed to the optimizer. Models that no optimizer trains, and on which backward was never
        called, are not judged.

    Formula:
        No gradient: the run's ledger (its list of hooks and how often each fired) has no firing of
        the parameter's param.grad, although a backward ran and the parameter requires a gradient,
        and no optimizer step changed it. NEVER-CALLED reports parameters of modules that were never
        called. If the parameter's module was called, its output has got a gradient, so the
        parameter is not used for it; or it got none, and the path from the loss ends somewhere
        behind it: after the last called module that had a graph and got no gradient, and before the
        next one that got one. Modules are in the order in which they returned. What this next one
        was given tells more: if nothing of it has a graph, the path ends between the two; if
        something has, or has the figures of an input of the model, the path goes past the module
        without a gradient, whose result is cut off where it is used, or is not used at all; whole
        numbers pass no gradient on. Paths that end in the same way in each block of a model, so
        that only numbers in the names differ, are one finding.

        No way through a module: a module that was given something with a graph returns a tensor
        that the loss uses and that does not lead back to it, and a number that does, as a quantiser
        with a loss of its own, by the graph of the first step. Then all parameters before it get
        gradients, but only of that number.

        No optimizer: it got a gradient in min_samples measured steps, and no recorded optimizer
        step held it, although other parameters of the same root are in an optimizer. If the
        parameters of the optimizers are recorded, NOT-OPTIMIZED reports it instead.

    Window:
        The whole run. The first case needs the ledger, which is written when the program ends.

    Thresholds:
        - min_samples (3): an optimizer may step only every few backward passes.
        - named (6): the most parameters that the message names.

    Severity:
        - error: no parameter of the model got any gradient, and none changed.
        - warning: usually.
        - info: there is no way through a module, which may be meant.

    Evidence:
        The parameters, and the cause: the one in the ledger, where the path from the loss ends
        (last: the last module without a gradient, next: the next one with a gradient, given: what
        the module after last was given; again: the other blocks where it ends so), or that no
        optimizer holds them.

    Remedy:
        Where the path is cut, remove detach(), .data or no_grad between the named modules, or give
        a reentrant checkpoint an input that requires a gradient. Else use the parameter in the
        forward, remove it, or call requires_grad_(False) on it; pass model.parameters() to the
        optimizer once the model is complete, and keep layers in nn.ModuleList.

    Cannot see:
        What is between two modules: detach(), .data and numbers taken out of the graph look the
        same, and so does a next module that takes something else. Values of compiled code have no
        graph that could be seen. Gradients that arrive and are zero, as behind a mask, are
        GRAD-ZERO.
    """

    min_samples: int = 3
    named: int = NAMED

    code = "UNUSED-PARAM"
    name = "a trainable parameter is not trained"
    severity = "warning"
    of_training = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield a finding for every cause, for parameters that no optimizer holds, and for outputs without a way back."""
        paths = uncalled(recording)
        alive = _Alive.of(recording)
        judged = [
            entry
            for entry in unreached(recording)
            if alive.judges(path_of(entry))
            and not any(within(path_of(entry), other) for other in paths)
        ]
        for root, entries in by_root(judged, lambda entry: root_of(recording, path_of(entry))):
            severity: Severity = "warning"
            if alive.stands_still(root):
                severity = "error"
            if root not in alive.roots and trains_in_vain(recording):
                continue  # NOT-OPTIMIZED says that the optimizer holds the wrong parameters
            for alike in _alike(_silences(recording, root, entries)):
                silence = alike[0][0]
                sites = [entry.site for _, silent in alike for entry in silent]
                says = f"got no gradient in the whole run: {silence.cause}{silence.lines}"
                again = tuple(_named(other.last or "") for other, _ in alike[1:])
                if again:
                    places = counted(len(again), "other place")
                    says += f"; it ends so at {places}, too: {listed(again, 3)}"
                evidence = silence.evidence(sites, again)
                yield self._finding(says, evidence, silence.remedy, severity)
        for event in events_of(recording, NoWayBackEvent):
            yield self._way(event)
        if optimizers(recording) is None:
            yield from self._forgotten(recording)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of an end of the program, when the ledger is written."""
        return no_end(self.code, recording)

    def _way(self, event: NoWayBackEvent) -> Finding:
        through = listed(event.through, 3)
        module = _named(unescape(event.site.rpartition(":")[0]))
        return Finding(
            code=self.code,
            severity="info",
            site=event.site,
            step=event.step,
            message=f"{module} was called with a value that needs a gradient, but none comes past "
            f"{event.site}: of what {module} returned, only {through} leads back to that value. So "
            f"what is before {module} learns from {through} alone.",
            evidence=NoWayBackEvidence(output=event.site, through=event.through),
            confidence=0.8,
            remedy=f"If it is to learn from what is made of {event.site} as well, let gradients "
            "pass straight through a choice (argmin, round, indexing): x + (y - x).detach() in "
            "place of y. Else nothing is wrong.",
        )

    def _forgotten(self, recording: Recording) -> Iterator[Finding]:
        held = {site.path for kind in ("param", "update") for site in recording.of_kind(kind)}
        grads = trained_sites(recording, "param.grad")
        grads = [site for site in grads if self._often(recording, site)]
        for _, own in by_root(grads, lambda site: site.root):
            sites = [site.site for site in own if site.path not in held]
            if sites and len(sites) < len(own):
                says = "got gradients, but no optimizer that stepped has it"
                evidence = UnusedParamEvidence(sites=sites, cause="in no optimizer", of=len(own))
                yield self._finding(says, evidence, _FORGOTTEN, self.severity)

    def _often(self, recording: Recording, site: SiteInfo) -> bool:
        return bool((recording.rows(site).level == FULL).sum() >= self.min_samples)

    def _finding(
        self,
        says: str,
        evidence: UnusedParamEvidence | CutPathEvidence,
        remedy: str,
        severity: Severity,
    ) -> Finding:
        sites = evidence.sites
        return Finding(
            code=self.code,
            severity=severity,
            site=sites[0],
            step=-1,
            message=f"{listed(sites, self.named)} {says}.",
            evidence=evidence,
            confidence=0.9,
            remedy=remedy,
        )


@dataclass(frozen=True)
class _Alive:
    """The parameters that a recording shows to be trained, also where hooks of the ledger never fired.

    Attributes:
        recording: The recording.
        moved: The paths of parameters with a recorded gradient, or with an update other than zero.
        roots: The roots with any recorded gradient or update.
        updated: The roots with an optimizer whose updates are recorded, if only of zero.
    """

    recording: Recording
    moved: frozenset[str]
    roots: frozenset[int]
    updated: frozenset[int]

    @classmethod
    def of(cls, recording: Recording) -> _Alive:
        """Return the trained parameters of a recording."""
        every = recording.all_rows
        # An optimizer skips parameters without a gradient: their updates are recorded as zero.
        there = every.lengths > 0
        moved = every.any(every.rows.sumsq > 0)
        kinds = {"param.grad": there, "param.acc": there, "update": moved}
        seen = [
            site
            for kind, shown in kinds.items()
            for site in recording.of_kind(kind)
            if shown[site.id]
        ]
        graded = [site for site in recording.of_kind("out.grad") if there[site.id]]
        updated = [site for site in recording.of_kind("update") if there[site.id]]
        return cls(
            recording,
            frozenset(s.path for s in seen),
            frozenset(s.root for s in (*seen, *graded)),
            frozenset(s.root for s in updated),
        )

    def stands_still(self, root: int) -> bool:
        """Whether an optimizer stepped with this root, of which nothing got a gradient or moved."""
        return root in self.updated and root not in self.roots

    def judges(self, path: str) -> bool:
        """Whether a parameter without a gradient should have got one: its model is trained, and it never moved."""
        root = root_of(self.recording, path)
        roots = self.recording.roots
        trained = roots[root].trained if 0 <= root < len(roots) else None
        # Where this is not recorded, a model without gradients ran under no_grad, if another one
        # has gradients.
        if path in self.moved:
            return False
        return trained is True or not self.roots or root in self.roots


class _Silence(NamedTuple):
    """Why parameters got no gradient.

    Attributes:
        cause: What the recording shows.
        remedy: What to do, as a sentence.
        last: The last module without a gradient on the path from them to the loss; None where the
            path is not known.
        next: The next module with a gradient; None without one.
        given: What the module after the last one was given, if that is known.
        lines: The lines between which the path ends, in brackets; empty if they are not known.
    """

    cause: str
    remedy: str
    last: str | None = None
    next: str | None = None
    given: Given | None = None
    lines: str = ""

    def evidence(
        self, sites: Sequence[str], again: Sequence[str]
    ) -> UnusedParamEvidence | CutPathEvidence:
        """Return the evidence about some parameters, and more places where a path ends so."""
        if self.last is None:
            return UnusedParamEvidence(sites=sites, cause=self.cause, again=again)
        return CutPathEvidence(
            sites=sites,
            cause=self.cause,
            last=self.last,
            next=self.next,
            given=self.given,
            again=again,
        )


def _silences(
    recording: Recording, root: int, entries: Iterable[LedgerLine]
) -> dict[_Silence, list[LedgerLine]]:
    """Return the entries of one root by the reason why they got no gradient."""
    paths = GradientPaths.of(recording, root)
    top = root_path(recording, root)
    ends = [(entry, paths.end(path_of(entry), top)) for entry in entries]
    ruled_out = {}
    for entry, end in ends:
        if end and end.without == end.last:
            ruled_out[end.last] = entry.ungraded or ""
    # The path to what is before a call without a graph ends there as well.
    cut_at: dict[str, dict[str, None]] = {}
    for path, mode in ruled_out.items():
        cut_at.setdefault(mode, {})[paths.outermost(path)] = None
    groups: dict[_Silence, list[LedgerLine]] = {}
    for entry, end in ends:
        if end is None:
            silence = _Silence(entry.cause, remedy_of(entry))
        elif end.without in ruled_out:
            mode = ruled_out[str(end.without)]
            silence = _without_graph(mode, list(cut_at[mode]))
        elif end.inside:
            silence = _beside(end)
        else:
            whole = end._replace(last=paths.whole(end))
            silence = _behind(whole, paths.unasked_around(whole))
            silence = silence._replace(lines=_lines(paths, whole))
        groups.setdefault(silence, []).append(entry)
    return groups


def _alike(
    silences: dict[_Silence, list[LedgerLine]],
) -> list[list[tuple[_Silence, list[LedgerLine]]]]:
    """Return the silences in groups: those of one group differ only in the numbers of blocks, as in ``h.3.attn``."""
    groups: dict[tuple[str | None, ...], list[tuple[_Silence, list[LedgerLine]]]] = {}
    for silence, entries in silences.items():
        key = tuple(
            None if text is None else _NUMBER_OF_BLOCK.sub("*", text)
            for text in (silence.cause, silence.remedy, silence.last, silence.next)
        )
        groups.setdefault(key, []).append((silence, entries))
    return list(groups.values())


_NUMBER_OF_BLOCK = re.compile(r"(?<![^\s.,:;])\d+(?![^\s.,:;])")


def _without_graph(mode: str, modules: list[str]) -> _Silence:
    """Return the silence of what is used in modules that were called without a graph, and before them."""
    called = listed([_named(path) for path in modules], 3)
    if mode == "cut checkpoint":
        return _Silence(
            f"the modules ran, but {called} ran in a reentrant checkpoint none of "
            "whose inputs requires a gradient, so that no backward runs through it",
            "Use checkpoint(..., use_reentrant=False), or let the input of the "
            "checkpoint require a gradient (requires_grad_(), or "
            "enable_input_require_grads() of transformers).",
            modules[-1],
        )
    if mode in ("no_grad inside", "inference_mode inside"):
        name = mode.removesuffix(" inside")
        return _Silence(
            f"the modules ran, but {called} ran under {name} in a forward with grad, "
            "so the path from the loss ends there",
            f"Remove torch.{name} there; if it is meant, call requires_grad_(False) "
            "on what is only used there or before it.",
            modules[-1],
        )
    return _Silence(
        f"the modules ran, but what {called} returned had no graph, so the path from "
        "the loss ends there",
        "Look in it and around its call for no_grad, detach(), .data or a reentrant "
        "checkpoint whose inputs require no gradient; if that is meant, call "
        "requires_grad_(False).",
        modules[-1],
    )


def _beside(end: PathEnd) -> _Silence:
    """Return the silence of parameters whose module got a gradient."""
    return _Silence(
        f"{_named(end.last)} ran, and the gradient of its output does not pass there",
        "Use it in the forward, or set requires_grad_(False); if it is used, look "
        "inside the module for detach(), .data or no_grad.",
        end.last,
    )


def _behind(end: PathEnd, unasked: Sequence[str]) -> _Silence:
    """Return the silence of what is used before the end of a path.

    Args:
        end: The end.
        unasked: What the next module with a gradient returned and got no gradient of, if the last
            one without is inside of it.
    """
    last, before = _named(end.last), "the loss"
    if end.after is not None:
        before = _named(end.after)
    behind = before
    if end.without is not None:
        behind = _named(end.without)
    if unasked:
        cause = (
            f"the modules ran, but no gradient came to what {last} returned: it is the last that ran in "
            f"{before}, and of what that returned, {listed(unasked, 3)} got no gradient"
        )
        remedy = (
            f"Let the loss use it, if it comes from {last}; if it is only meant to be looked at, "
            "call requires_grad_(False) on what makes it."
        )
    elif end.given == "no graph":
        cause = (
            f"the modules ran, and no gradient came to what lies before {behind}: {last} returned "
            f"a value with a graph, and nothing that {behind}, next, was given has one, so the path "
            f"from the loss ends between {last} and {behind}"
        )
        remedy = (
            f"Look between {last} and {behind} for detach(), .data, no_grad, argmax or a value "
            f"rebuilt from numbers (item(), numpy()). If {behind} takes nothing from {last}, what "
            f"{last} returned is cut off elsewhere, or the loss does not use it: use it, or call "
            "requires_grad_(False)."
        )
    elif end.given == "whole numbers":
        cause = (
            f"the modules ran, but {behind}, after {last}, was given whole numbers alone, which "
            f"pass no gradient on, and nothing else came back to {last}"
        )
        remedy = (
            f"If {last} makes these numbers (argmax, round, long()), give {behind} something with "
            f"a slope; else the loss does not use what {last} returned: use it, or call "
            "requires_grad_(False)."
        )
    elif end.given == "graph" and end.without is not None:
        cause = (
            f"the modules ran, but {behind}, after {last}, was given a value with a graph and "
            "returned one without, so the path from the loss ends there"
        )
        remedy = (
            f"Look in {behind} and around its call for no_grad, detach(), .data or a result of "
            "whole numbers. If it is meant, call requires_grad_(False) on what is only used "
            "before it."
        )
    elif end.given in ("graph", "input") and end.without is None:
        taken = "a value with a graph"
        if end.given == "input":
            taken = "an input of the model"
        cause = (
            f"the modules ran, but no gradient came to what {last} returned, although {behind}, "
            f"next, was given {taken} and got a gradient: the path from the loss goes past {last}"
        )
        remedy = (
            f"Look where the result of {last} is used: it is cut off there (detach(), .data, "
            "no_grad, argmax, numbers taken out of it), or the loss does not use it. If it is "
            "meant, call requires_grad_(False), which saves the cost of a graph."
        )
    else:
        cause, remedy = _unknown_end(end, last, before)
    return _Silence(cause, remedy, end.last, end.after, end.given)


def _lines(paths: GradientPaths, end: PathEnd) -> str:
    """Return the lines that call the modules on both sides of an end, in brackets."""
    behind = end.without or end.after
    calls = [f"{_named(end.last)} is called at {paths.lines.get(end.last)}"]
    known = end.last in paths.lines
    if behind and not within(end.last, behind):
        calls.append(f"{_named(behind)} at {paths.lines.get(behind)}")
        known = known and behind in paths.lines
    if not known:
        return ""
    return f" ({', '.join(calls)})"


def _unknown_end(end: PathEnd, last: str, before: str) -> tuple[str, str]:
    """Return the cause and the remedy where the recording does not say what the next module was given."""
    reached = "nothing behind it got one"
    if end.after is not None:
        reached = f"{before} after it got a gradient"
    without = ""
    if end.without is not None:
        without = f"; {_named(end.without)}, next, returned a value without a graph"
    cause = (
        f"the modules ran, but the path from the loss ends after {last}: {reached}, "
        f"and {last} got none{without}"
    )
    remedy = (
        f"Look between {last} and {before} for one of: detach(), .data, no_grad, a "
        "value rebuilt from numbers, a reentrant checkpoint whose inputs require no "
        "gradient, or a result that the loss does not use. If it is meant, call "
        "requires_grad_(False), which saves the cost of a graph."
    )
    return cause, remedy


def _named(path: str) -> str:
    return escape(path) or "the model itself"


_FORGOTTEN = (
    "Pass it to an optimizer: make the optimizer when the model is complete, and "
    "keep layers in nn.ModuleList; if it should not be trained, call "
    "requires_grad_(False), which saves the cost of its gradient."
)
