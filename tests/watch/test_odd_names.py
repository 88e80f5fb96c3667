"""Modules whose names have characters of the site language are judged as others, and shown in one form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kedge.report.module_lines import lines
from kedge.rules.judgement import judge
from kedge.rules.rule import Finding
from kedge.sites.site import escape
from kedge.store.recording import Recording
from tests.watch.watched import watch

ODD = " b:out[0]#1{Linear}*/x, it's \"\\ \n$(id)!"


class Faulty(nn.Module):
    """A model of which one part is cut off, one not called, and one kept from the optimizer."""

    def __init__(self, ending: str) -> None:
        super().__init__()
        self.ending = ending
        for name in ("cut", "idle", "kept", "head"):
            self.add_module(name + ending, nn.Linear(4, 4))

    def part(self, name: str) -> nn.Module:
        """Return the part of a name."""
        return self.get_submodule(name + self.ending)

    def forward(self, x: Tensor) -> Tensor:
        """Pass through all parts but one."""
        x = self.part("cut")(x).detach()
        x = self.part("kept")(x)
        result: Tensor = self.part("head")(x)
        return result


def judged(ending: str) -> tuple[Recording, list[Finding]]:
    """Train a model whose names end so; return the recording and its findings."""
    torch.manual_seed(0)
    model = Faulty(ending)

    def program() -> None:
        parts = [param for name, param in model.named_parameters() if "kept" not in name]
        optimizer = torch.optim.SGD(parts, 0.01)
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()

    recording = watch(program, every=1).recording()
    return recording, list(judge(recording).findings)


def test_names_that_a_selector_escapes_are_judged_as_others() -> None:
    """The findings are those of plain names; they and the table have the names in the form of the sites."""
    recording, findings = judged(ODD)
    _, plain = judged("")

    def plainly(text: str) -> str:
        return text.replace(escape(ODD), "")

    assert {finding.code for finding in plain} >= {"UNUSED-PARAM", "NEVER-CALLED", "NOT-OPTIMIZED"}
    assert [(f.code, f.severity, plainly(f.site), plainly(f.message)) for f in findings] == [
        (f.code, f.severity, f.site, f.message) for f in plain
    ]
    assert {escape(name + ODD) for name in ("cut", "kept", "head")} <= {
        line.label for line in lines(recording)
    }
