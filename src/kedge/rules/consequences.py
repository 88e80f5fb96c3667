"""Causes and effects among findings: the cause is a warning or an error, its effects become hints.

# Note [Consequences]
A learning rate that is too large kills units, stops gradients and makes the loss jump. A rule of
its own finds each of these, and the remedies of all but one would mislead. So a finding becomes
info if a cause of it was found as a warning or an error, in the same model or in one that the same
optimizer trains, and not clearly later; and the rule of the cause looks whether it can be one
there. Each rule names its causes, the deepest first, and a finding that is info is not a cause: so
the deepest is named, and there are no circles. What follows from an effect alone follows from its
cause. The cause gets the worst severity of its effects: an input that stops all training is an
error. A NaN ends the training, so it stays an error, and only names its cause. A symptom is info in
any case, but gets the remedy of its cause.

Why faults follow from others: equal weights get equal gradients, and weights of zero get none and
pass none on. Inputs or weights of the wrong size make outputs, gradients and steps so. A loss
without a lower bound moves the weights without end, and logarithms of logits make such a loss.
Gradients that add up make steps that are too long, which overwrite the weights. One sample less its
own mean is zero, whatever it was. Parameters that are not trained stay in their first state.
Numbers below the range of a narrow dtype become zero. Units without a slope pass no gradient on. If
all gradients were always zero, no weight has changed, and dead units were dead at the start. The
gradient that grew is also the one that jumps, and it makes the steps long. Steps that are far too
short change no loss. Where no loss has a gradient, what still moves the weights is no training.
Norms in evaluation mode do not hold the scale at the start, and what a module does in training
alone is not used then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import pairwise

import numpy as np

from kedge.rules.recorded.roots import root_of
from kedge.rules.rule import SEVERITIES, Finding, Rule, Severity
from kedge.sites.site import unescape
from kedge.store.recording import Recording

#: A finding that begins more than this number of measured steps before another one does not follow
#: from it.
LAG = 3


def causes_and_effects(rules: Iterable[Rule]) -> list[tuple[str, frozenset[str]]]:
    """Return each cause with its effects, a cause before what follows from it, as the rules name them.

    After a colon stands the kind of the finding's evidence.
    """
    effects: dict[str, set[str]] = {}
    order: TopologicalSorter[str] = TopologicalSorter()

    def put(effect: str, causes: list[str]) -> None:
        for before, after in pairwise((*causes, effect)):
            order.add(after, before)
        for cause in causes:
            effects.setdefault(cause, set()).add(effect)

    for rule in rules:
        if isinstance(rule.follows, Mapping):
            for kind, causes in rule.follows.items():
                put(f"{rule.code}:{kind}", causes.split())
        else:
            put(rule.code, rule.follows.split())
        for effect in rule.leads_to.split():
            put(effect, [rule.code])
    return [
        (cause, frozenset(effects[cause])) for cause in order.static_order() if cause in effects
    ]


def follow(
    recording: Recording, findings: Iterable[Finding], rules: Iterable[Rule]
) -> list[Finding]:
    """Return findings, with those that may follow from others as hints that name these; see Note [Consequences]."""
    found = list(findings)
    by_code = {rule.code: rule for rule in rules}
    deepest: dict[int, int] = {}
    models = _Models(recording)
    for cause, effects in causes_and_effects(by_code.values()) if len(found) > 1 else ():
        causes = [
            i
            for i, each in enumerate(found)
            if cause in _kinds(each) and (each.severity != "info" or i in deepest)
        ]
        for at, finding in enumerate(found):
            rule = by_code.get(finding.code)
            hinted = finding.severity == "info" and not (rule and rule.is_symptom)
            if hinted or finding.follows or not _kinds(finding) & effects:
                continue
            for i in causes:
                first = deepest.get(i, i)
                can_be = models.may_follow(finding, found[i]) and first != at
                if can_be and by_code[found[i].code].explains(recording, found[i], finding):
                    worst = min(found[first].severity, finding.severity, key=SEVERITIES.index)
                    found[first] = replace(found[first], severity=worst)
                    deepest[at] = first
                    found[at] = _lowered(finding, found[first].code, rule)
                    break
    return found


def _lowered(finding: Finding, cause: str, rule: Rule | None) -> Finding:
    severity: Severity = "info"
    if rule is not None and rule.ends_training:
        severity = finding.severity
    return replace(
        finding,
        severity=severity,
        message=f"{finding.message} It may follow from {cause}.",
        follows=cause,
        remedy=f"Fix {cause} first.",
    )


@dataclass(frozen=True)
class _Models:
    """The models that the findings of a recording belong to."""

    recording: Recording

    def may_follow(self, finding: Finding, cause: Finding) -> bool:
        """Whether a finding belongs to the same models as a cause, and is not clearly earlier."""
        here = self._concerned(finding.site)
        there = self._concerned(cause.site)
        if here is not None and there is not None and not here & there:
            return False
        since, begin = np.searchsorted(self.recording.steps, [finding.step, cause.step])
        return finding.step < 0 or cause.step < 0 or bool(since >= begin - LAG)

    @cached_property
    def _roots(self) -> dict[str, int]:
        return {site.site: site.root for site in self.recording.sites}

    def _concerned(self, site: str) -> frozenset[int] | None:
        """Return the roots that share an optimizer with that of a site; None if the site concerns the whole program.

        Sites of losses do, and those of models that no optimizer trains: the models that they serve
        are not known.
        """
        roots = self.recording.roots
        path = unescape(site.rpartition(":")[0])
        own = self._roots.get(site, root_of(self.recording, path))
        if not 0 <= own < len(roots) or roots[own].trained is False:
            return None
        held = set(roots[own].optimizers)
        return frozenset(
            i for i, root in enumerate(roots) if i == own or held & set(root.optimizers)
        )


def _kinds(finding: Finding) -> frozenset[str]:
    """Return the names under which the table may have a finding: its code, and the code with its kind."""
    kind = finding.evidence.kind
    if not kind:
        return frozenset([finding.code])
    return frozenset([finding.code, f"{finding.code}:{kind}"])
