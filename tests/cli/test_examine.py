"""``kedge examine``: a program is taken over at its second step, tried, and ended."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

Kedge = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[..., str]

PROGRAM = """
    import atexit
    import sys
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x, y = torch.randn(160, 3, 8, 8), torch.randint(0, 5, (160,))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 3, padding=1)
            self.norm = nn.BatchNorm2d(6)
            self.head = nn.Linear(6 * 64, 5)

        def forward(self, x):
            hidden = self.norm(self.conv(x)).relu()
            return self.head(hidden.flatten(1))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    atexit.register(lambda: Path("at-exit").touch())
    Path("log.txt").write_text("begun")
    for epoch in range(2):
        for batch, labels in DataLoader(TensorDataset(x, y), 16, shuffle=True):
            loss = nn.functional.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print("loss", loss.item())
    torch.save(model.state_dict(), "model.pt")
"""
MIXED = ("hidden.flatten(1)", "hidden.transpose(0, 1).reshape(len(x), -1)")


@pytest.fixture
def results(kedge: Kedge, script: Script) -> Callable[..., dict[str, Any]]:
    """Examine a program with changes of its text; returns the JSON."""

    def examine(*changes: tuple[str, str], source: str = PROGRAM) -> dict[str, Any]:
        for before, after in changes:
            assert before in source
            source = source.replace(before, after)
        done = kedge("examine", "--json", script(source))
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == int(found["verdict"] == "wrong"), done.stderr
        return found

    return examine


def told(found: dict[str, Any], trial: str, verdict: str) -> str:
    """Return what a trial said with a verdict, with the line."""
    return " ".join(
        f"{each['came']} {each['means']} {each['where']}"
        for each in found["results"]
        if (each["trial"], each["verdict"]) == (trial, verdict)
    )


def test_a_sound_program_has_nothing_wrong(kedge: Kedge, script: Script, tmp_path: Path) -> None:
    """The report is all of stdout, and the program's own end does not come."""
    done = kedge("examine", script(PROGRAM))

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("Net: nothing wrong in ")
    assert "the program has written: log.txt\n" in done.stdout
    assert done.stderr.count("loss") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "train.py"]


def test_samples_that_mix_are_wrong_with_the_line(results: Any) -> None:
    """The data loader says which dimension counts the samples."""
    found = results(MIXED)

    said = told(found, "samples", "wrong")
    assert "first in the code that leads to the input of head, after norm" in said
    assert said.endswith("train.py:22")
    assert told(found, "one-batch", "ok")


def test_the_loss_is_computed_again_as_the_program_does(results: Any) -> None:
    """Also where its batches come neither from a loader nor from random numbers."""
    change = (
        "for batch, labels in DataLoader(TensorDataset(x, y), 16, shuffle=True):",
        "for i in range(0, 160, 16):\n            batch, labels = x[i:i + 16], y[i:i + 16]",
    )
    extra = (
        "cross_entropy(model(batch), labels)",
        "cross_entropy(model(batch), labels) + 0.1 * model.head.weight.square().mean().sqrt()",
    )

    found = results(change, extra)

    assert " -> " in told(found, "one-batch", "ok")


def test_what_a_step_costs_is_told_in_numbers(results: Any) -> None:
    """The bytes of the model and of its loss, the line that keeps most, the largest batch, and the time."""
    found = results()

    kept, plans, limit = (each for each in found["results"] if each["trial"] == "memory")
    assert kept["where"] == "train.py:21"
    assert kept["numbers"]["bytes_outside"] > 0
    assert plans["numbers"]["bytes_moved"] <= kept["numbers"]["bytes"]
    per_sample = kept["numbers"]["bytes"] / 16
    assert limit["numbers"]["bytes_per_sample"] > 0.9 * per_sample
    assert limit["numbers"]["first_too_large"] > 1000
    (time,) = (each for each in found["results"] if each["trial"] == "time")
    assert 0 < time["numbers"]["backward"] < time["numbers"]["step"]


def test_gradients_that_are_made_small_or_broken_are_told(results: Any) -> None:
    """Between backward and step, or by an infinite slope behind a finite loss."""
    step = "            optimizer.step()"
    clipped = "            nn.utils.clip_grad_norm_(model.parameters(), 1e-6)\n" + step
    assert "Something in between makes them that small" in told(
        results((step, clipped)), "optimizer", "look"
    )

    root = "cross_entropy(model(batch), labels) + (model.norm.bias * 0).norm()"
    broken = (
        "cross_entropy(model(batch), labels)",
        root.replace(".norm()", ".square().sum().sqrt()"),
    )
    assert "had one that is NaN or infinite" in told(results(broken), "optimizer", "wrong")


def test_labels_that_are_drawn_by_chance_are_told(results: Any) -> None:
    """The same sample has another label each time; where the inputs change as well, that may be meant."""
    own = """
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 160

        def __getitem__(self, i):
            return x[i], torch.randint(0, 5, ())

    model = Net()
    """
    changes = (
        ("    model = Net()\n", own.strip("\n").rstrip(" ")),
        ("TensorDataset(x, y)", "Data()"),
    )

    assert "the labels were not, of 0" in told(results(*changes), "batch", "look")

    noisy = ("return x[i], ", "return x[i] + torch.randn(3, 8, 8), ")
    assert not told(results(*changes, noisy), "batch", "look")
    assert not told(results(), "batch", "look")


def test_steps_without_a_backward_pass_are_wrong(results: Any) -> None:
    """Nothing else is said of the graph, which no loss has shown."""
    found = results(("            loss.backward()\n", ""))

    assert "none came before 3 steps" in told(found, "optimizer", "wrong")
    assert not told(found, "parameters", "wrong")


def test_a_model_under_no_grad_is_told(results: Any) -> None:
    """The optimizer holds it, and no loss depends on it."""
    found = results(
        (
            "loss = nn.functional",
            "with torch.no_grad():\n                out = model(batch)\n            out = out * scale\n            loss = nn.functional",
        ),
        ("cross_entropy(model(batch)", "cross_entropy(out"),
        ("SGD(model.parameters()", "SGD([*model.parameters(), scale]"),
        ("    optimizer = ", "    scale = nn.Parameter(torch.ones(()))\n    optimizer = "),
    )

    said = told(found, "parameters", "look")
    assert "of 7 tensors of the optimizer, the loss does not depend on 6" in said


def test_a_program_that_steps_in_its_backward_pass_is_examined(results: Any) -> None:
    """Each parameter has an optimizer, and a hook that steps as soon as its gradient is there."""
    hooks = """    def step(param):
        steps[param].step()
        steps[param].zero_grad()

    steps = {param: torch.optim.SGD([param], lr=0.05) for param in model.parameters()}
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for epoch in range(2):
"""
    found = results(
        ("    for epoch in range(2):\n", hooks),
        ("            optimizer.zero_grad()\n", ""),
        ("            optimizer.step()\n", ""),
    )

    assert found["verdict"] == "ok"
    assert told(found, "samples", "ok")


ADVERSARIES = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 2), nn.Linear(2, 1)
    maker_optimizer = torch.optim.SGD(maker.parameters(), lr=0.1)
    judge_optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)
    bce = nn.BCEWithLogitsLoss()
    for step in range(3):
        made = maker(torch.randn(8, 4))
        judge_optimizer.zero_grad()
        (bce(judge(torch.randn(8, 2)), torch.ones(8, 1)) + bce(judge(made.detach()), torch.zeros(8, 1))).backward()
        judge_optimizer.step()
        maker_optimizer.zero_grad()
        bce(judge(made), torch.ones(8, 1)).backward()
        maker_optimizer.step()
"""


def test_gradients_of_one_of_two_optimizers_are_kept(results: Any) -> None:
    """The judge's, to which the maker's backward pass adds; where they are set to zero, none are."""
    assert not told(results(source=ADVERSARIES), "optimizer", "wrong")

    found = results(("        judge_optimizer.zero_grad()\n", ""), source=ADVERSARIES)

    assert "those of before were still there" in told(found, "optimizer", "wrong")


def test_a_model_that_another_step_trains_is_not_called_wrong(results: Any) -> None:
    """One optimizer trains both in turns; where it trains this one alone, nothing reaches it."""
    source = """
        import torch
        from torch import nn

        torch.manual_seed(0)
        one, other = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
        for step in range(4):
            hidden = one(torch.randn(8, 4))
            loss = other(hidden.detach()).square().mean()
            if step > 1:
                loss = hidden.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """
    found = results(source=source)
    assert "a later one this" in told(found, "parameters", "look")
    assert not told(found, "parameters", "wrong")

    found = results(
        ("SGD([*one.parameters(), *other.parameters()]", "SGD(one.parameters()"), source=source
    )
    assert "depends on no parameter of this model" in told(found, "parameters", "wrong")


def test_two_optimizers_of_one_model_are_told(results: Any) -> None:
    """The other model is in neither."""
    found = results(("SGD(maker.parameters()", "SGD(judge.parameters()"), source=ADVERSARIES)

    assert "two optimizers hold the same parameters" in told(found, "optimizer", "look")


def test_gradients_that_are_gone_or_kept_are_wrong(results: Any) -> None:
    """As the optimizer steps, and as the next backward pass begins."""
    swapped = (
        "optimizer.zero_grad()\n            loss.backward()",
        "loss.backward()\n            optimizer.zero_grad()",
    )
    assert "none of 6 parameters had one" in told(results(swapped), "optimizer", "wrong")
    kept = ("optimizer.zero_grad()\n", "\n")
    assert "zero_grad() is missing" in told(results(kept), "optimizer", "wrong")


FORGETFUL = """
    class Forgetful(torch.optim.{base}):
        @torch.no_grad()
        def step(self, closure=None):
            kept = [(p, p.clone()) for g in self.param_groups for p in g["params"] if p.dim() == 4]
            super().step(closure)
            for param, value in kept:
                param.copy_(value)

    optimizer = Forgetful(model.parameters(), lr={rate})
"""
SGD = "    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)\n"


@pytest.mark.parametrize(
    ("base", "rate", "is_told"), [("Adam", 1e-3, True), ("SGD", 0.05, True), ("SGD", 0.0, False)]
)
def test_a_step_that_changes_nothing_is_told(
    results: Any, base: str, rate: float, is_told: bool
) -> None:
    """A parameter with a gradient and a rate stays as it is; not if the rate is zero."""
    found = results((SGD, FORGETFUL.format(base=base, rate=rate)))

    told = [each for each in found["results"] if "did not change" in each["came"]]
    assert [each["verdict"] for each in told] == (["look"] if is_told else [])
    if is_told:
        assert told[0]["trial"] == "optimizer"
        assert told[0]["came"].endswith("did not change: conv.weight")


def test_steps_that_are_rounded_away_are_not_called_without_effect(results: Any) -> None:
    """A rate that is too small for the precision is what the one-batch trial tells."""
    changes = [
        ("model = Net()", "model = Net().bfloat16()"),
        ("model(batch)", "model(batch.bfloat16())"),
    ]

    found = results(*changes, ("lr=0.05", "lr=1e-6"))

    assert not [each for each in found["results"] if "did not change" in each["came"]]


def told_of_steps(found: Any) -> list[str]:
    """Return what was said of the inputs of the first two steps."""
    return [each["came"] for each in found["results"] if "first two steps" in each["did"]]


def test_the_same_batch_again_is_told(results: Any) -> None:
    """By the data that the loader reads; the whole of it is meant to come again."""
    begun_anew = (
        "for batch, labels in DataLoader(",
        "for _ in range(9):\n            batch, labels = next(iter(DataLoader(",
    )
    ended = ("16, shuffle=True):", "16)))")

    assert told_of_steps(results(begun_anew, ended)) == [
        "the model was given the same ones again: `x`"
    ]
    assert told_of_steps(results(begun_anew, ("16, shuffle=True):", "160)))"))) == []
    assert told_of_steps(results()) == []


PAIRED = """
    import torch
    from torch import nn

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.word = nn.Embedding(12, 8)
            self.image = nn.Linear(6, 8)
            self.place = nn.Embedding(4, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, words, images, places):
            places = self.place(places).mean(1)
            return self.head(self.word(words).mean(1) + self.image(images) + places)

    torch.manual_seed(0)
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        words, images = torch.randint(12, (20, 2)), torch.randn(20, 6)
        output = model(words, images, torch.arange(4)[None].expand(20, 4))
        optimizer.zero_grad()
        nn.functional.cross_entropy(output, torch.randint(3, (20,))).backward()
        optimizer.step()
"""


def test_one_sample_beside_a_batch_is_told(results: Any) -> None:
    """If it is another one in each step: what stays the same serves all."""
    one = results(("(12, (20, 2))", "(12, (1, 2))"), source=PAIRED)
    place = results((".expand(20, 4)", ""), source=PAIRED)

    assert told_of_steps(one) == [
        "`words` has one sample, another one in each step, and `images`, `places` 20"
    ]
    assert told_of_steps(place) == told_of_steps(results(source=PAIRED)) == []


def test_a_step_that_is_missing_is_wrong(results: Any) -> None:
    """A hundred backward passes are waited for, or the end of the program."""
    found = results(("optimizer.step()\n", "\n"))

    assert "none did in 20 backward passes" in told(found, "optimizer", "wrong")


def test_a_program_that_steps_by_hand_is_no_error(results: Any) -> None:
    """Its parameters change."""
    by_hand = (
        "optimizer.step()",
        "[p.data.sub_(0.05 * p.grad) for p in model.parameters()]",
    )
    assert "changes its parameters itself" in told(results(by_hand), "optimizer", "ok")


def test_several_models_are_told_apart(results: Any) -> None:
    """Each is examined, and one's optimizer may leave gradients in the other."""
    source = """
        import torch
        from torch import nn

        torch.manual_seed(0)
        maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        judge = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        of_maker = torch.optim.Adam(maker.parameters(), 1e-3)
        of_judge = torch.optim.Adam(judge.parameters(), 1e-3)
        bce = nn.BCEWithLogitsLoss()
        for _ in range(50):
            real, made = torch.randn(32, 2), maker(torch.randn(32, 4))
            of_judge.zero_grad()
            (bce(judge(real), torch.ones(32, 1))
             + bce(judge(made.detach()), torch.zeros(32, 1))).backward()
            of_judge.step()
            of_maker.zero_grad()
            bce(judge(made), torch.ones(32, 1)).backward()
            of_maker.step()
    """
    found = results(source=source)

    assert found["models"] == ["Sequential", "Sequential_2"]
    assert not [each for each in found["results"] if each["verdict"] in ("wrong", "look")]
    assert "several optimizers" in told(found, "one-batch", "untried")


def test_a_later_training_is_examined_on_demand(kedge: Kedge, script: Script) -> None:
    """It begins with the steps of another optimizer."""
    source = """
        import torch
        from torch import nn

        torch.manual_seed(0)
        x, y = torch.randn(30, 4), torch.randint(0, 3, (30,))
        teacher = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        student = nn.Linear(4, 3)
        for model, trained in ((teacher, teacher), (student, teacher)):
            optimizer = torch.optim.SGD(trained.parameters(), lr=1.0)
            for _ in range(20):
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    """
    first = kedge("examine", script(source))
    second = kedge("examine", "--optimizer", "2", "train.py")

    assert (first.returncode, second.returncode) == (0, 1), first.stdout + second.stdout
    assert "Sequential: nothing wrong" in first.stdout
    assert "are in no optimizer: weight, bias" in " ".join(second.stdout.split())


def test_trials_are_left_out_by_name(kedge: Kedge, script: Script) -> None:
    """An unknown name is refused before the program runs."""
    done = kedge("examine", "--skip", "one-batch,precision", script(PROGRAM))
    assert "one-batch" not in done.stdout
    assert "precision" not in done.stdout

    done = kedge("examine", "--skip", "speed", "train.py")
    assert done.returncode == 2
    assert "there is no trial speed: they are loss-at-start, " in done.stderr


def test_a_picture_is_drawn(kedge: Kedge, script: Script, tmp_path: Path) -> None:
    """Beside the report; a name without a known ending is refused before the program runs."""
    done = kedge("examine", "--picture", "it.svg", script(PROGRAM))
    assert done.returncode == 0, done.stderr
    assert (
        "one batch, over and over" in (tmp_path / "it.svg").read_text()
        or (tmp_path / "it.svg").stat().st_size
    )

    done = kedge("examine", "--picture", "it.doc", "train.py")
    assert done.returncode == 2
    assert "a picture's name ends in .svg, .png, .pdf" in done.stderr


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        ("import torch", 2, "nothing was examined: the program ended before a backward pass"),
        ("import torch\nraise SystemExit(5)", 5, "the program ended before a backward pass"),
        ("import torch\n1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_a_program_without_a_step_says_so(
    kedge: Kedge, script: Script, source: str, status: int, said: str
) -> None:
    """With its own status, if it has one."""
    done = kedge("examine", script(source))

    assert done.returncode == status
    assert said in done.stderr
    assert done.stdout == ""


def test_a_program_without_torch_says_so(kedge: Kedge, script: Script) -> None:
    """In a process that has not imported it."""
    done = kedge("examine", script("print(1)"), fresh=True)

    assert done.returncode == 2
    assert "the program did not import torch" in done.stderr


def test_one_of_several_ranks_is_refused(kedge: Kedge, script: Script) -> None:
    """It would wait for the others in the middle of a step."""
    done = kedge("examine", script(PROGRAM), env=dict(os.environ, RANK="0", WORLD_SIZE="2"))

    assert done.returncode == 2
    assert "run the program by itself" in done.stderr


SOUND = {
    "checkpointed": """
        from torch.utils.checkpoint import checkpoint
        inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = inner
            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=False)
        model = Net()
        train(model, lambda: F.cross_entropy(model(x), y))
    """,
    "target network": """
        model, target = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in "ab")
        train(model, lambda: F.mse_loss(model(x), target(x).detach() * 0.9 + 0.1))
    """,
    "average inside": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.online, self.target = nn.Linear(4, 3), nn.Linear(4, 3)
                self.target.requires_grad_(False)
            def forward(self, x):
                return self.online(x), self.target(x)
        model = Net()
        def loss():
            for a, b in zip(model.online.parameters(), model.target.parameters()):
                b.data.lerp_(a.data, 0.1)
            one, other = model(x)
            return F.cross_entropy(one, y) + F.mse_loss(one, other)
        train(model, loss)
    """,
    "adversarial examples": """
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        def loss():
            attacked = x.clone().requires_grad_()
            F.cross_entropy(model(attacked), y).backward()
            model.zero_grad()
            return F.cross_entropy(model((x + 0.1 * attacked.grad.sign()).detach()), y)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    """,
    "evaluation first": """
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        model.eval()
        print(F.cross_entropy(model(x), y).item())
        model.train()
        train(model, lambda: F.cross_entropy(model(x), y))
    """,
    "returned gradients": """
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(5):
            found = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            for param, gradient in zip(model.parameters(), found):
                param.grad = gradient
            optimizer.step()
    """,
}
BEFORE = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    x, y = torch.randn(32, 4), torch.randint(0, 3, (32,))

    def train(model, loss):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
"""


@pytest.mark.parametrize("kind", SOUND)
def test_nothing_is_wrong_with_a_sound_program(results: Any, kind: str) -> None:
    """Its training differs from the plain one in a way that is meant."""
    found = results(source=dedent(BEFORE) + dedent(SOUND[kind]))

    assert found["verdict"] != "wrong", found["results"]
    assert not [
        each
        for each in found["results"]
        if each["trial"] == "one-batch" and each["verdict"] == "untried"
    ]


def test_an_error_of_the_program_is_not_judged(kedge: Kedge, script: Script) -> None:
    """No optimizer has stepped, as the program did not come to it."""
    done = kedge("examine", script(PROGRAM.replace("optimizer.step()", "raise KeyError(1)")))

    assert done.returncode == 1
    assert "KeyError: 1" in done.stderr
    assert done.stdout == ""
