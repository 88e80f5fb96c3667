"""Causes in the forward pass: a module whose inputs are equal and whose output is not."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kedge.compare.alignment.modules import RecordedModule, flow
from kedge.compare.alignment.sites import SameSite
from kedge.compare.first_parting import FirstParting, PartingCause, is_called_from_outside
from kedge.compare.wording import change_between, name_of_module, names_of_modules
from kedge.short_text import counted

#: Modules that draw random numbers, by the names of their classes.
RANDOM = re.compile(r"drop|stochastic|gumbel|rrelu|noise", re.IGNORECASE)
#: Modules that may draw random numbers inside, by the names of their classes.
DRAWING = re.compile(r"att(entio)?n|transformer|lstm|gru|rnn", re.IGNORECASE)
#: Modules that multiply matrices, which GPUs may do in a coarser format.
PRODUCTS = re.compile(r"linear|conv|attention|lstm|gru|rnn", re.IGNORECASE)
#: The range of the error of a product in TensorFloat-32.
COARSE_PRODUCT = (2.0**-16, 2.0**-8)


def dtype(facts: FirstParting) -> PartingCause | None:
    """The cause if a module computes in another dtype."""
    same = facts.first.same
    if same.kind not in ("in", "out") or not facts.differing_dtypes([facts.sites.index(same)]):
        return None
    outputs = [i for i, other in enumerate(facts.sites) if other.kind == "out"]
    n = len(facts.differing_dtypes(outputs))
    return PartingCause(
        "dtype",
        f"another dtype: {same.text} is {same.a.dtype} in A and {same.b.dtype} in B",
        f"so are {n} of {counted(len(outputs), 'output')}; {_before(facts)}",
    )


def randomness(facts: FirstParting) -> PartingCause | None:
    """The cause if a module drew other random numbers."""
    module = facts.first.same.module
    if facts.first.same.kind != "out" or not module.kept or not RANDOM.search(module.a.type):
        return None
    return PartingCause(
        "random",
        f"other random numbers: {name_of_module(module.a)} is the first to differ",
        f"{_before(facts)}; use the same seed in both",
    )


def layer(facts: FirstParting) -> PartingCause | None:
    """The cause if a module was changed, or exists in one recording alone."""
    same = facts.first.same
    if same.kind not in ("in", "out"):
        return None
    module = same.module
    if same.kind == "out" and not module.kept:
        return PartingCause(
            "layer", f"a changed layer: {change_between(module.a, module.b)}", _before(facts)
        )
    for side, only in (
        ("B", facts.comparison.alignment.only_b),
        ("A", facts.comparison.alignment.only_a),
    ):
        added = _between(facts, only, side.lower())
        if added:
            other = "A" if side == "B" else "B"
            return PartingCause(
                "layer",
                f"a changed layer: {side} has {names_of_modules(added)}, {other} does not",
                _before(facts),
            )
    return None


def _between(
    facts: FirstParting, only: Sequence[RecordedModule], side: str
) -> list[RecordedModule]:
    """Return the modules of one side that fire between the last equal site and the first different one."""
    last = getattr(facts.first.same, side)
    known = [getattr(facts.sites[i], side) for i in facts.compared("in", "out")]
    start = max((site.id for site in known if site.id < last.id), default=-1)
    return [
        module
        for module in only
        if module.segments != last.path.split(".")[: len(module.segments)]
        and any(flow(site) == "out" and start < site.id < last.id for site in module.sites)
    ]


def rounding(facts: FirstParting) -> PartingCause | None:
    """The cause if the same arithmetic is rounded differently."""
    if not facts.is_rounding:
        return None
    a, b = facts.comparison.a.manifest, facts.comparison.b.manifest
    evidence = f"the first difference is as small as rounding; {_before(facts)}"
    for key, name in (("torch", "another version of PyTorch"), ("device", "another device")):
        if a.get(key) != b.get(key) and not facts.column:  # else they were equal all the same
            return PartingCause(
                key, f"{name}: {a.get(key, 'unknown')} in A, {b.get(key, 'unknown')} in B", evidence
            )
    reasons = (
        "compiled code, another number of threads, or non-deterministic kernels can be the reason"
    )
    return PartingCause(
        "rounding", "rounding: the same arithmetic in a different order", f"{evidence}; {reasons}"
    )


def products(facts: FirstParting) -> PartingCause | None:
    """The cause if products of matrices have a coarser format."""
    same, (least, most) = facts.first.same, COARSE_PRODUCT
    devices = [str(r.manifest.get("device", "")) for r in (facts.comparison.a, facts.comparison.b)]
    kind = same.module.a.type
    if (
        same.kind != "out"
        or not PRODUCTS.search(kind)
        or not any("cuda" in device for device in devices)
    ):
        return None
    if same.a.dtype != "float32" or not least < facts.first.apart < most:
        return None
    return PartingCause(
        "products",
        f"perhaps products of matrices in TensorFloat-32: {same.text} is the first to differ",
        f"{_before(facts)}, and they are {facts.first.apart:.1g} apart; compare torch.backends.cuda.matmul.allow_tf32",
    )


def code(facts: FirstParting) -> PartingCause | None:
    """The cause if a module computes something else, or code between modules does."""
    same = facts.first.same
    if same.kind == "in":
        headline = (
            f"the input of {same.module.label} is computed differently, by code between modules"
        )
        return PartingCause(
            "code",
            headline,
            f"{_before(facts)}; functions such as F.dropout are not modules: compare their arguments",
        )
    if same.kind != "out":
        return None
    known = [i for i in facts.compared("in") if facts.sites[i].module is same.module]
    inputs = "its inputs are" if known else "everything before is"
    parameters = [i for i in facts.compared("param") if facts.sites[i].module is same.module]
    given = f"{inputs} {facts.equal_before()}" + (
        ", and so are its parameters" if parameters and known else ""
    )
    if DRAWING.search(same.module.a.type):
        given += "; such a module may drop values at random: compare its rate of dropout, and use the same seed in both"
    name = name_of_module(same.module.a)
    if is_called_from_outside(facts.comparison.a, same) and same.module.leaf:
        given += "; whole numbers, such as targets, are not measured"
        return PartingCause("loss", f"{name} computes something else, or gets other targets", given)
    a, b = (
        facts.comparison.value(facts.sites.index(same), facts.column, "rms", side)
        for side in ("a", "b")
    )
    if (a == 0) != (b == 0):
        return PartingCause("code", f"{name} returns only zeros in {'A' if a == 0 else 'B'}", given)
    return PartingCause("code", f"{name} computes something else", given)


def _before(facts: FirstParting) -> str:
    """Return a sentence about the equal sites before the first difference."""
    before = _equal_sites(facts)
    return f"at step {facts.step} the {counted(len(before), 'site')} before it are {facts.equal_before()}"


def _equal_sites(facts: FirstParting) -> list[SameSite]:
    place = facts.sites.index(facts.first.same)
    return [same for i, same in enumerate(facts.sites[:place]) if facts.is_compared(i)]
