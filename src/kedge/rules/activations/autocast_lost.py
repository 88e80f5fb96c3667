"""AUTOCAST-LOST: a layer that computes in float32 where its neighbours compute in half precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kedge.rules.evidence import Evidence, said
from kedge.rules.naming import NAMED
from kedge.rules.recorded.roots import by_root, names_of
from kedge.rules.recorded.weights import weights
from kedge.rules.recorded.wiring import ModuleSites, Wiring, wire
from kedge.rules.rule import Finding, Rule
from kedge.short_text import listed
from kedge.store.recording import Recording, SiteInfo

_HALF = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, kw_only=True)
class AutocastLostEvidence(Evidence):
    """The layers that autocast did not reach, and how many it reached."""

    sites: Sequence[str] = said("at {}")
    dtype: str = said("the others return {}")
    lowered: int = said("{} layers compute in it")


@dataclass(frozen=True)
class AutocastLost(Rule):
    """A layer between others that autocast made compute in half precision computes in float32.

    Meaning:
        Inside of torch.autocast, matrix products and convolutions compute in bfloat16 or float16.
        A custom operation, a compiler or an inner autocast(enabled=False) may leave some in
        float32: they are slower and take more memory. Some are left so on purpose, such as a
        router or a layer that would overflow.

    Formula:
        Layers are modules with a weight of at least two dimensions in float32. A layer is lowered
        if its output has a dtype of half precision. Reported are layers whose input has such a
        dtype and whose output is float32, in a model with at least min_lowered lowered layers, and
        fewer that are not. The last layer of a model is left out: many programs compute it in
        float32.

    Window:
        The first measured step of each module.

    Thresholds:
        - min_lowered (2): layers.

    Evidence:
        The layers, and the number of those that compute in half precision.

    Remedy:
        Let the layer call an operation that autocast knows, or register the autocast rule of a
        custom one (torch.library.register_autocast).

    Cannot see:
        Whether it is meant; functions that a forward calls between its modules; a layer that gets
        float32 because the one before it was lost, too.
    """

    min_lowered: int = 2

    code = "AUTOCAST-LOST"
    name = "a layer computes in float32 inside autocast"
    severity = "info"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        wiring = wire(recording)
        for root, layers in by_root(_layers(recording, wiring), lambda layer: layer.root):
            lowered = _lowered(wiring, layers)
            lost = [wiring.sites[each.outs[0]] for each in layers[:-1] if _is_lost(wiring, each)]
            if lost and len(lowered) >= self.min_lowered and len(lost) < len(lowered):
                yield self._finding(recording, root, lost, lowered)

    def idle(self, recording: Recording) -> str:
        """Return that no module with weights in float32 returned values of half precision."""
        wiring = wire(recording)
        if _lowered(wiring, _layers(recording, wiring)):
            return ""
        return "no autocast"

    def _finding(
        self, recording: Recording, root: int, lost: list[SiteInfo], lowered: list[SiteInfo]
    ) -> Finding:
        dtype = lowered[0].dtype
        sites = [site.site for site in lost]
        verb = "compute"
        if len(lost) == 1:
            verb = "computes"
        step = 0
        if len(recording.steps):
            step = int(recording.steps[0])
        return Finding(
            code=self.code,
            severity=self.severity,
            site=lost[0].site,
            step=step,
            message=f"{listed(sites, 3)} of {names_of(recording, [root])} {verb} in float32 and got "
            f"{dtype}, in which {len(lowered)} other layers of it compute: autocast did not reach it.",
            evidence=AutocastLostEvidence(sites=sites[:NAMED], dtype=dtype, lowered=len(lowered)),
            confidence=0.6,
            remedy="Let it call an operation that autocast knows, or register the autocast rule of a "
            "custom one (torch.library.register_autocast). Nothing is wrong if it is to compute in "
            "float32.",
        )


def _layers(recording: Recording, wiring: Wiring) -> list[ModuleSites]:
    """Return the modules with a weight in float32, in the order in which they return."""
    owners = {w.param.owner for w in weights(recording) if w.param.dtype == "float32"}
    return [module for module in wiring if module.path in owners]


def _lowered(wiring: Wiring, layers: Iterable[ModuleSites]) -> list[SiteInfo]:
    """Return the first outputs of layers that are of half precision."""
    outs = (wiring.sites[out] for layer in layers for out in layer.outs[:1])
    return [out for out in outs if out.dtype in _HALF]


def _is_lost(wiring: Wiring, layer: ModuleSites) -> bool:
    if not layer.ins or not layer.outs:
        return False
    given, out = wiring.sites[layer.ins[0]], wiring.sites[layer.outs[0]]
    return given.dtype in _HALF and out.dtype == "float32"
