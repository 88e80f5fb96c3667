"""Where the compiled part is missing, PyTorch's reductions give the same statistics."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
{before}
import torch
import kedge
from kedge import native

assert not native.available()
assert {why!r} in native.why_not(), native.why_not()
assert native.instruction_sets() == []
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
with kedge.hook(model, "*", kedge.measure()) as stats:
    out = model(torch.randn(5, 4))
found = stats["1"]
assert abs(found.sum - out.sum().item()) < 1e-5
assert (found.count, found.max, found.nonzero) == (15, out.max().item(), out.count_nonzero().item())
squares, nonfinite = native.all_finite_and_norm([out, None, torch.full((2,), float("inf"))])
assert (squares, nonfinite) == (float("inf"), 2)
assert abs(native.measure(out)["sumsq"] - out.square().sum().item()) < 1e-5
"""


def run(before: str, why: str) -> None:
    """Run the script after some lines of its own."""
    subprocess.run(
        [sys.executable, "-c", SCRIPT.format(before=before, why=why)], check=True, timeout=300
    )


def test_it_was_not_built() -> None:
    """The import fails, and nothing else does."""
    run('sys.modules["kedge.native._native"] = None', "not built")


def test_pytorch_has_no_description_for_c() -> None:
    """A PyTorch without DLPack's table of functions is used as before."""
    run(
        "import torch, torch._C\n"
        "held = next(c for c in torch.Tensor.__mro__ if '__dlpack_c_exchange_api__' in vars(c))\n"
        "try:\n    del held.__dlpack_c_exchange_api__\n"
        "except (TypeError, AttributeError):\n    sys.modules['kedge.native._native'] = None\n",
        "",
    )
