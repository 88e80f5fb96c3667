"""Causes in the forward pass: a module whose inputs are equal and whose output is not."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kedge.compare.alignment.modules import RecordedModule, flow
from kedge.compare.first_parting import FirstParting, PartingCause, is_called_from_outside
from kedge.compare.wording import change_between, name_of_module, names_of_modules
from kedge.short_text import counted
from kedge.store.recording import SiteInfo

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
    differing = len(facts.differing_dtypes(outputs))
    return PartingCause(
        "dtype",
        f"another dtype: {same.text} is {same.a.dtype} in A and {same.b.dtype} in B",
        f"so are {differing} of {counted(len(outputs), 'output')}; {_before(facts)}",
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
        headline = f"a changed layer: {change_between(module.a, module.b)}"
        return PartingCause("layer", headline, _before(facts))

    alignment = facts.comparison.alignment
    known = [facts.sites[i] for i in facts.compared("in", "out")]
    added = _between(alignment.only_b, [pair.b for pair in known], same.b)
    if added:
        headline = f"a changed layer: B has {names_of_modules(added)}, A does not"
        return PartingCause("layer", headline, _before(facts))
    added = _between(alignment.only_a, [pair.a for pair in known], same.a)
    if added:
        headline = f"a changed layer: A has {names_of_modules(added)}, B does not"
        return PartingCause("layer", headline, _before(facts))
    return None


def _between(
    only: Sequence[RecordedModule], known: Sequence[SiteInfo], last: SiteInfo
) -> list[RecordedModule]:
    """Return the modules that only one side has that fire between the last equal site and another.

    Args:
        only: The modules that only this side has.
        known: The sites of this side that were compared.
        last: The first site that differs.
    """
    start = max((site.id for site in known if site.id < last.id), default=-1)
    found = []
    for module in only:
        holds_last = list(module.segments) == last.path.split(".")[: len(module.segments)]
        outputs = [site.id for site in module.sites if flow(site) == "out"]
        if not holds_last and any(start < number < last.id for number in outputs):
            found.append(module)
    return found


def rounding(facts: FirstParting) -> PartingCause | None:
    """The cause if the same arithmetic is rounded differently."""
    if not facts.is_rounding:
        return None
    evidence = f"the first difference is as small as rounding; {_before(facts)}"
    for key, name in (("torch", "another version of PyTorch"), ("device", "another device")):
        a = facts.comparison.a.manifest.get(key, "unknown")
        b = facts.comparison.b.manifest.get(key, "unknown")
        if a != b and not facts.column:  # else they were equal all the same
            return PartingCause(key, f"{name}: {a} in A, {b} in B", evidence)
    return PartingCause(
        "rounding",
        "rounding: the same arithmetic in a different order",
        f"{evidence}; compiled code, another number of threads, "
        "or non-deterministic kernels can be the reason",
    )


def products(facts: FirstParting) -> PartingCause | None:
    """The cause if products of matrices have a coarser format."""
    same = facts.first.same
    if same.kind != "out" or not PRODUCTS.search(same.module.a.type):
        return None
    a = str(facts.comparison.a.manifest.get("device", ""))
    b = str(facts.comparison.b.manifest.get("device", ""))
    if "cuda" not in a and "cuda" not in b:
        return None
    least, most = COARSE_PRODUCT
    if same.a.dtype != "float32" or not least < facts.first.apart < most:
        return None
    return PartingCause(
        "products",
        f"perhaps products of matrices in TensorFloat-32: {same.text} is the first to differ",
        f"{_before(facts)}, and they are {facts.first.apart:.1g} apart; "
        "compare torch.backends.cuda.matmul.allow_tf32",
    )


def code(facts: FirstParting) -> PartingCause | None:
    """The cause if a module computes something else, or code between modules does."""
    same = facts.first.same
    if same.kind == "in":
        label = same.module.label
        return PartingCause(
            "code",
            f"the input of {label} is computed differently, by code between modules",
            f"{_before(facts)}; functions such as F.dropout are not modules: "
            "compare their arguments",
        )
    if same.kind != "out":
        return None

    own_kinds = {
        facts.sites[i].kind
        for i in facts.compared("in", "param")
        if facts.sites[i].module is same.module
    }
    if "in" not in own_kinds:
        given = f"everything before is {facts.equal_before()}"
    elif "param" not in own_kinds:
        given = f"its inputs are {facts.equal_before()}"
    else:
        given = f"its inputs are {facts.equal_before()}, and so are its parameters"
    if DRAWING.search(same.module.a.type):
        given += (
            "; such a module may drop values at random: "
            "compare its rate of dropout, and use the same seed in both"
        )

    name = name_of_module(same.module.a)
    if is_called_from_outside(facts.comparison.a, same) and same.module.leaf:
        given += "; whole numbers, such as targets, are not measured"
        return PartingCause("loss", f"{name} computes something else, or gets other targets", given)
    a, b = facts.pair(facts.sites.index(same), "rms")
    if a == 0 and b != 0:
        return PartingCause("code", f"{name} returns only zeros in A", given)
    if b == 0 and a != 0:
        return PartingCause("code", f"{name} returns only zeros in B", given)
    return PartingCause("code", f"{name} computes something else", given)


def _before(facts: FirstParting) -> str:
    """Return a sentence about the equal sites before the first difference."""
    place = facts.sites.index(facts.first.same)
    before = sum(map(facts.is_compared, range(place)))
    return (
        f"at step {facts.step} the {counted(before, 'site')} before it are {facts.equal_before()}"
    )
