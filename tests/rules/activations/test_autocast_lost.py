"""AUTOCAST-LOST: a layer that computes in float32 between others that autocast made compute in half precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kedge.rules.activations.autocast_lost import AutocastLost
from kedge.rules.rule import Finding
from tests.rules.goldens import Golden, golden, written
from tests.rules.scenes import Course, steady
from tests.watch.watched import watch


class Full(nn.Linear):
    """Computes in float32, as a custom operation that autocast does not know."""

    def forward(self, x):
        """Leave autocast."""
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(x.float(), self.weight, self.bias)


def found(*layers: nn.Module, dtype: torch.dtype | None = torch.bfloat16) -> list[Finding]:
    """Train layers inside of autocast; return what the rule finds."""
    model = nn.Sequential(*layers)

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = model(torch.randn(8, 4)).float().square().mean()
            loss.backward()
            optimizer.step()

    return list(AutocastLost().check(watch(program, every=1).recording()))


def line(kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    """Make a layer."""
    return kind(4, 4)


def test_a_layer_between_others_is_named():
    """With the number of those that autocast reached."""
    (finding,) = found(line(), nn.GELU(), line(Full), nn.GELU(), line())

    assert (finding.severity, finding.site) == ("info", "2:out")
    assert finding.message == (
        "2:out of Sequential computes in float32 and got bfloat16, in which 2 other layers of it "
        "compute: autocast did not reach it."
    )


@pytest.mark.parametrize(
    "layers",
    [
        lambda: (line(), line(), line()),
        lambda: (line(), line(), line(Full)),
        lambda: (line(), nn.LayerNorm(4), line()),
        lambda: (line(), line(Full), line(Full)),
    ],
    ids=["all reached", "the last layer", "a norm", "a single one is lowered"],
)
def test_other_layers_are_no_finding(layers):
    """A norm has no weight of two dimensions; a last layer is often left so."""
    assert found(*layers()) == []


def test_without_autocast_nothing_is_lost():
    """All compute in float32."""
    assert found(line(), line(Full), line(), dtype=None) == []


@golden("AUTOCAST-LOST")
def golden_autocast_lost(*, fires: bool) -> Golden:
    """Return float32 from the second of four layers, or half precision."""
    course = Course(range(3))
    for path in ("a", "b", "c", "d"):
        course.weight(path, steady(0.1, 1e-3, 1e-4), out=0.1)
    for site in course.sites:
        lost = fires and site["site"] == "b:out"
        is_out = site["site"].endswith(":out")
        site["dtype"] = "bfloat16" if is_out and not lost else "float32"
    course.sites += [{"site": f"{path}:in", "dtype": "bfloat16"} for path in ("b", "c", "d")]
    return written(course)
