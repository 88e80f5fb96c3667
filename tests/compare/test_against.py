"""What held in a good run is asked of other runs of a small program, in every step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kedge
from kedge.cli.main import main
from kedge.compare.against.departures import departures
from kedge.compare.comparison import compare
from kedge.compare.verdict import judge
from kedge.errors import CannotCompare
from kedge.rules.rule import Finding
from kedge.store.recording import Recording


class Net(nn.Module):
    """A frozen part, a batch norm, a dropout, and a branch that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16).requires_grad_(False)
        self.norm = nn.BatchNorm1d(16)
        self.up = nn.Linear(16, 32)
        self.drop = nn.Dropout(0.1)
        self.side = nn.Linear(16, 32)
        self.head = nn.Linear(32, 4)
        self.is_detached = False
        self.is_without_side = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.stem(x))
        if self.is_detached:
            hidden = hidden.detach()
        wide = torch.relu(self.up(hidden))
        if not self.is_without_side:
            wide = wide + self.side(hidden)
        return self.head(self.drop(wide))


def nothing(net: Net) -> None:
    """Leave the model as it is."""


@dataclass
class Training:
    """A training whose parts can be changed before it runs."""

    seed: int = 0
    steps: int = 30
    batch: int = 16
    rate: float = 0.05
    falls_to: float = 1.0
    scale: float = 1.0
    factor: float = 1.0
    mode: bool = True
    mode_of_evaluation: bool = False
    evaluates: bool = True
    zeroes: bool = True
    accumulates: int = 1
    is_drawn_once: bool = False
    held: Callable[[Net], list[nn.Parameter]] = lambda net: list(net.parameters())
    kind: type[torch.optim.Optimizer] = torch.optim.SGD
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    prepare: Callable[[Net], None] = field(default=nothing)

    def run(self) -> None:
        torch.manual_seed(self.seed)
        net = Net()
        self.prepare(net)
        given = [{"params": self.held(net), "lr": self.rate}]
        optimizer = self.kind(given)
        data = self.scale * torch.randn(256, 8)
        targets = (data[:, :2] > 0).long() @ torch.tensor([1, 2])
        chosen = torch.randint(256, (self.batch,))
        for step in range(self.steps):
            net.train(self.mode)
            if self.zeroes:
                optimizer.zero_grad()
            for _ in range(self.accumulates):
                if not self.is_drawn_once:
                    chosen = torch.randint(256, (self.batch,))
                loss = self.factor * self.loss(net(data[chosen]), targets[chosen])
                loss.backward()
            optimizer.step()
            if step == self.steps // 2:
                optimizer.param_groups[0]["lr"] = self.rate * self.falls_to
            if self.evaluates and step % 5 == 4:
                net.train(self.mode_of_evaluation)
                with torch.no_grad():
                    for part in data.split(64):
                        net(part)


Watched = Callable[[str, Training], Recording]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Record each step of a training."""
    folder = tmp_path_factory.mktemp("against")

    def run(name: str, training: Training) -> Recording:
        place = folder / f"{name}.kedge"
        with kedge.watch(place, every=1, budget=None, force=True):
            training.run()
        return Recording.open(place)

    return run


@pytest.fixture(scope="module")
def good(watched: Watched) -> Recording:
    """The good run."""
    return watched("good", Training())


@pytest.mark.parametrize(
    "training",
    [
        Training(seed=1),
        Training(seed=2, steps=70),
        Training(seed=3, steps=20),
        Training(seed=4, batch=64),
        Training(seed=5, batch=8, steps=45),
    ],
    ids=["seed", "longer", "shorter", "larger batches", "smaller batches"],
)
def test_all_holds_in_a_healthy_repetition(
    watched: Watched, good: Recording, training: Training
) -> None:
    """Another seed, length and batch size change no relation."""
    assert departures(watched("again", training), good) == ()


def thawed(net: Net) -> None:
    """Train the part that is frozen in the good run."""
    net.stem.requires_grad_(True)


def frozen_head(net: Net) -> None:
    """Freeze a part that is trained in the good run."""
    net.head.requires_grad_(False)


def detached(net: Net) -> None:
    """Cut the way to the batch norm."""
    net.is_detached = True


def without_side(net: Net) -> None:
    """Leave out a branch."""
    net.is_without_side = True


def in_double(net: Net) -> None:
    """Compute the last layer in another dtype."""
    net.head.double()
    net.drop.register_forward_hook(lambda module, args, output: output.double())


def wider(net: Net) -> None:
    """Make a layer with other parameters."""
    net.up = nn.Linear(16, 48)
    net.side = nn.Linear(16, 48)
    net.head = nn.Linear(48, 4)


def more_dropout(net: Net) -> None:
    """Drop more."""
    net.drop.p = 0.6


def heads(net: Net) -> list[nn.Parameter]:
    """Return the parameters of the last layer."""
    return list(net.head.parameters())


FAULTS = {
    "moving": (Training(prepare=thawed), "stem"),
    "still": (Training(prepare=frozen_head), "head"),
    "firing": (Training(prepare=detached), "norm.weight:param.grad"),
    "layers": (Training(prepare=without_side), "side (Linear): called in the good run, and never"),
    "changed layers": (Training(prepare=wider), "up (Linear) has"),
    "dtype": (Training(prepare=in_double), "float32 in the good run"),
    "dropout": (Training(prepare=more_dropout), "kept 0.9 in the good run, and keep 0.4 here"),
    "modes": (Training(mode=False), "norm, drop: always trained in training mode"),
    "evaluation": (Training(mode_of_evaluation=True), "of the good run, and as in training in"),
    "no evaluation": (Training(evaluates=False), "in evaluation mode, and none is here"),
    "zero_grad": (Training(zeroes=False), "those of the step before are still added"),
    "calls": (Training(accumulates=4), "once in a step of the good run, 4 times here"),
    "optimizer": (Training(kind=torch.optim.Adagrad), "was SGD in the good run, and is Adagrad"),
    "held": (Training(held=heads), "held 10 parameters in the good run, and holds 2 here"),
    "rate": (Training(rate=0.5), "a learning rate of 0.5 here, 10 times as large"),
    "course": (Training(falls_to=0.1), "stays the same in the good run, and changes here"),
    "loss": (Training(loss=F.multi_margin_loss), "by Mul of MultiMarginLoss here"),
    "inputs": (Training(scale=30.0), ":in has a size of"),
    "repeats": (
        Training(is_drawn_once=True),
        "and is given the same ones in all 29 measured steps",
    ),
    "size of the loss": (Training(factor=20.0), "losses: loss has a size of"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_change_is_named(watched: Watched, good: Recording, fault: str) -> None:
    """What no longer holds is named, with what was seen in both runs and the first step."""
    training, words = FAULTS[fault]
    training.seed = 7

    found = departures(watched("other", training), good)

    named = [finding for finding in found if words in finding.message]
    assert named, [finding.message for finding in found]
    assert named[0].code == "DEPARTS"
    evidence = named[0].entry()["evidence"]
    assert evidence["good"] != evidence["here"]
    assert 0 <= named[0].step < 30


def all_frozen(net: Net) -> None:
    """Freeze two more layers."""
    net.norm.requires_grad_(False)
    net.up.requires_grad_(False)


@pytest.mark.parametrize("is_frozen_in_the_good_run", [True, False])
def test_what_is_frozen_is_no_other_layer_and_no_other_loss(
    watched: Watched, good: Recording, is_frozen_in_the_good_run: bool
) -> None:
    """A layer that is not trained has its parameters still, and the loss is computed as before."""
    frozen = watched("frozen", Training(seed=1, prepare=all_frozen))
    runs = (good, frozen) if is_frozen_in_the_good_run else (frozen, good)

    kinds = {finding.evidence.kind for finding in departures(*runs)}

    assert kinds & {"moving", "still"}
    assert not kinds & {"layers", "loss", "operations"}


class Captions(nn.Module):
    """Takes images, and a word for each."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(12, 8)
        self.image = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, words: Tensor, images: Tensor) -> Tensor:
        return self.head(self.word(words).mean(1) + self.image(images))


def train_captions(words: int, *, seed: int, images: int = 16) -> None:
    """Train with some words for each batch of images."""
    torch.manual_seed(seed)
    model = Captions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        chosen, seen = torch.randint(12, (words, 2)), torch.randn(images, 6)
        optimizer.zero_grad()
        F.cross_entropy(model(chosen, seen), (seen[:, 0] > 0).long()).backward()
        optimizer.step()


def test_an_input_of_one_sample_departs(tmp_path: Path) -> None:
    """Where all inputs of the good run have a batch; a batch of another size does not."""
    runs = {}
    for name, words, images in (("good", 16, 16), ("larger", 32, 32), ("one", 1, 16)):
        with kedge.watch(tmp_path / f"{name}.kedge", every=1, budget=None):
            train_captions(words, seed=images + words, images=images)
        runs[name] = Recording.open(tmp_path / f"{name}.kedge")

    assert departures(runs["larger"], runs["good"]) == ()
    (found,) = departures(runs["one"], runs["good"])
    assert found.evidence.kind == "batch"
    assert "here it gets one sample of input 0, and 16 of 1" in found.message


def train_in_folds(steps: int, *, folds: int = 3) -> None:
    """Train one model after another, each with an optimizer of its own."""
    for seed in range(folds):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(steps):
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()


def test_trainings_one_after_another_may_be_longer(tmp_path: Path) -> None:
    """Then fewer of their optimizers have stepped up to a step."""
    runs = {}
    for name, steps in (("good", 20), ("longer", 34)):
        with kedge.watch(tmp_path / f"{name}.kedge", every=1, budget=None):
            train_in_folds(steps)
        runs[name] = Recording.open(tmp_path / f"{name}.kedge")

    assert departures(runs["longer"], runs["good"]) == ()
    assert departures(runs["good"], runs["longer"]) == ()


def train_normed(*, is_evaluated_first: bool, seed: int) -> None:
    """Train a model that computes in evaluation with what it estimates in training."""
    torch.manual_seed(seed)
    norm = nn.utils.spectral_norm
    model = nn.Sequential(
        norm(nn.Linear(64, 64)),
        nn.ReLU(),
        norm(nn.Linear(64, 64)),
        nn.ReLU(),
        norm(nn.Linear(64, 4)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(4):
        for trains in (not is_evaluated_first, is_evaluated_first):
            model.train(trains)
            for _ in range(8 if trains else 3):
                x = torch.randn(32, 64)
                with torch.set_grad_enabled(trains):
                    loss = F.cross_entropy(model(x), (x[:, :2] > 0).long() @ torch.tensor([1, 2]))
                if trains:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()


def test_an_evaluation_before_what_it_needs_departs(tmp_path: Path) -> None:
    """Its outputs are far from those of training, as they are nowhere in the good run."""
    runs = {}
    for name, is_first, seed in (("good", False, 0), ("again", False, 1), ("first", True, 2)):
        with kedge.watch(tmp_path / f"{name}.kedge", every=1, budget=None):
            train_normed(is_evaluated_first=is_first, seed=seed)
        runs[name] = Recording.open(tmp_path / f"{name}.kedge")

    assert departures(runs["again"], runs["good"]) == ()
    found = departures(runs["first"], runs["good"])
    assert [each.evidence.kind for each in found] == ["evaluation"]
    assert found[0].severity == "warning"
    assert "in 2 of 5 evaluated outputs" in found[0].message


def test_a_step_is_the_first_that_shows_it(watched: Watched, good: Recording) -> None:
    """A learning rate that changes in the middle departs there, and not in the first step."""
    (found,) = departures(watched("falling", Training(seed=1, falls_to=0.1)), good)

    assert found.site == "optimizer 0"
    assert 15 <= found.step <= 21


def test_a_range_is_said_to_be_inferred(watched: Watched, good: Recording) -> None:
    """A range is no fact of the program: it is a warning, and its message says that it is inferred."""
    found = departures(watched("scaled", Training(seed=1, scale=30.0)), good)

    assert {finding.severity for finding in found} == {"warning"}
    assert all("inferred from the range" in finding.message for finding in found)
    assert all(finding.entry()["evidence"]["inferred"] for finding in found)


def test_a_fact_is_not_followed_by_ranges(watched: Watched, good: Recording) -> None:
    """Sizes that depart together with a fact may follow from it, and are not listed."""
    found = departures(watched("fast", Training(seed=1, rate=50.0)), good)

    assert {finding.severity for finding in found} == {"error"}


def other_program() -> None:
    """Train a model that has nothing of the other one."""
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.LazyLinear(3))
    model(torch.randn(4, 1, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 1, 8)).square().mean().backward()
        optimizer.step()


@pytest.fixture
def other(tmp_path: Path) -> Recording:
    """The recording of another program."""
    with kedge.watch(tmp_path / "other.kedge"):
        other_program()
    return Recording.open(tmp_path / "other.kedge")


def test_another_program_is_refused(good: Recording, other: Recording) -> None:
    """Relations of another program are not asked."""
    with pytest.raises(CannotCompare, match="these are different programs, with 0 of the good"):
        departures(other, good)


def of_modules(names: str) -> Recording:
    """Return the recording of some layers, each of which fires in three steps."""
    texts = [f"{name}:out" for name in names.split()]
    figures = {"count": 4, "sum": 0.0, "sumsq": 4.0, "min": -1.0, "max": 1.0, "level": 2}
    rows = [{"site": text, "step": step, **figures} for text in texts for step in range(3)]
    return Recording.build([{"site": text, "type": "Linear"} for text in texts], rows)


def test_a_program_that_has_lost_most_of_its_model_is_the_same_one() -> None:
    """Blocks that are no longer in the model depart; the rest shows that it is the same program."""
    (found,) = departures(of_modules("stem head"), of_modules("stem one two three four head"))

    assert found.entry()["evidence"]["paths"] == ["one", "two", "three", "four"]


def test_a_run_without_steps_is_refused(good: Recording) -> None:
    """Nothing held in a run without a measured step."""
    with pytest.raises(CannotCompare, match="the run has no measured step"):
        departures(Recording.build(), good)


def test_the_command_ends_as_without_a_good_run(
    watched: Watched, good: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    """A departure that is a fact fails; a repetition does not."""
    again = watched("again", Training(seed=3))
    fast = watched("fast", Training(seed=3, rate=0.5))

    assert main(["check", str(again.path), "--against", str(good.path)]) == 0
    assert "what held in" in capsys.readouterr().out
    assert main(["check", str(fast.path), "--against", str(good.path)]) == 1
    assert "1 departure from" in capsys.readouterr().out
    assert main(["check", str(fast.path), "--against", str(good.path), "--fail-on", "never"]) == 0


def test_an_inferred_departure_fails_where_warnings_do(watched: Watched, good: Recording) -> None:
    """What is inferred counts as a warning."""
    scaled = str(watched("scaled", Training(seed=1, scale=6.0)).path)

    asked = ["check", scaled, "--against", str(good.path)]
    assert main(asked) == 0
    assert main([*asked, "--fail-on", "warning"]) == 1


def test_the_document_names_the_good_run(
    watched: Watched, good: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    """Programs get the departures among the findings, and the errors of the good run itself."""
    fast = watched("fast", Training(seed=3, rate=0.5))

    main(["check", str(fast.path), "--against", str(good.path), "--json"])

    document = json.loads(capsys.readouterr().out)
    assert document["against"] == {"recording": str(good.path), "errors": []}
    departed = [each for each in document["findings"] if each["code"] == "DEPARTS"]
    assert [each["evidence"]["kind"] for each in departed] == ["rate"]
    assert departed[0]["evidence"]["good"] == "0.05"


def test_errors_of_the_good_run_are_said(
    watched: Watched, good: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    """A good run that is not good is no measure: its errors are named, and the check goes on."""
    broken = watched("broken", Training(factor=float("nan")))

    main(["check", str(good.path), "--against", str(broken.path)])

    assert "has errors itself (NAN-BORN" in capsys.readouterr().err


def test_the_command_refuses_another_program(
    good: Recording, other: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status says that the runs cannot be compared."""
    assert main(["check", str(other.path), "--against", str(good.path)]) == 2
    assert "these are different programs" in capsys.readouterr().err


def test_diff_leads_with_what_departs_if_the_seeds_differ(
    watched: Watched, good: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another seed explains every value, and not another learning rate."""
    fast = watched("fast", Training(seed=3, rate=0.5))

    assert main(["diff", str(good.path), str(fast.path)]) == 1

    said = capsys.readouterr().out
    headline = said.index("1 relation of A, as the good run, does not hold in B")
    assert headline < said.index("10 times as large") < said.index("first difference")


def test_diff_without_departures_keeps_its_headline(watched: Watched, good: Recording) -> None:
    """A healthy repetition with another seed is just that."""
    verdict = judge(compare(good, watched("again", Training(seed=3))))

    assert verdict.cause.code == "seed"
    assert verdict.departures == ()


def of_ranks(drift: float) -> Recording:
    """Return the recording of two ranks whose parameters drift apart from the third step on."""
    rows = []
    for step in range(6):
        for rank in range(2):
            size = 1.0 + drift * rank * (step >= 3)
            figures = {"count": 4, "sum": 0.0, "min": -1.0, "max": 1.0, "nonzero": 4, "level": 2}
            figures |= {"step": step, "rank": rank, "sumsq": size}
            rows += [{"site": site, **figures} for site in ("fc.weight:param", "fc:out")]
    sites = [
        {"site": "fc.weight:param", "owner": "fc", "shape": [2, 2], "type": "Linear"},
        {"site": "fc:out", "shape": [2, 2], "type": "Linear"},
    ]
    return Recording.build(sites, rows)


def test_ranks_that_drift_apart_are_named() -> None:
    """A parameter that is equal on all ranks of the good run has to be equal here, too."""
    found: tuple[Finding, ...] = departures(of_ranks(0.5), of_ranks(0.0))

    assert [finding.entry()["evidence"]["kind"] for finding in found] == ["ranks"]
    assert found[0].step == 3
    assert departures(of_ranks(0.0), of_ranks(0.0)) == ()
    assert departures(of_ranks(0.5), of_ranks(0.5)) == ()
