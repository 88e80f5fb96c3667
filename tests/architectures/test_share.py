"""On real architectures: ``in.share`` is what PyTorch calls ``grad_input``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
import kedge
from tests.architectures.training import batch_of, seed
from tests.architectures.zoo import BY_NAME, SAMPLE, Architecture
from tests.marks import sampled

pytestmark = pytest.mark.filterwarnings("ignore::kedge.errors.NeverFiredWarning")


@pytest.mark.parametrize(
    "name", sampled(["bert", "gpt2", "t5", "vit", "segformer", "whisper"], SAMPLE)
)
def test_the_share_of_a_call_is_what_pytorch_calls_grad_input(name: str) -> None:
    """For every module with positional tensors in and one tensor out, ``in.share`` is what a full backward hook gets."""
    architecture = BY_NAME[name]
    model = architecture.build()
    with kedge.session() as s:
        acts = s.hook(model, "**:in.share", kedge.record())
        seed(2)
        architecture.loss(model(**batch_of(architecture))).backward()
        silent = {e.site.path for e in s.ledger() if not e.fired}
    expected = grad_inputs(architecture)
    wrong = []
    for path, grads in expected.items():
        got = [] if path in silent else [value for _, value in acts.records(f"{path}:in.share")]
        if len(got) != len(grads) or not all(any(close(a, b) for b in got) for a in grads):
            wrong.append(path)
    assert wrong == []
    assert len(expected) >= 10


def grad_inputs(architecture: Architecture) -> dict[str, list[Tensor]]:
    """What full backward hooks receive at modules of tensors in and out."""
    model = architecture.build()
    found: dict[str, list[Tensor]] = {}

    def listen(path: str) -> Callable[..., None]:
        return lambda module, given, arriving: found.setdefault(path, []).extend(
            g.clone() for g in given if g is not None
        )

    for path, module in model.named_modules():
        if type(module).__name__.endswith(("Linear", "LayerNorm", "Conv2d", "Conv1D", "Output")):
            module.register_full_backward_hook(listen(path))
    seed(2)
    architecture.loss(model(**batch_of(architecture))).backward()
    return {path: grads for path, grads in found.items() if grads}


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding: the identities of full backward hooks change the order of additions."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-7)
