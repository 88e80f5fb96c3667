"""What is noted of the forward passes of a root: its evaluations, and inputs that stay the same."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from kedge.torch_internals import modes
from kedge.torch_internals.hook_tables import after_forward, before_forward
from kedge.watch.records.facts import repeated_batches
from tests.watch.watched import watch


class Attention(nn.Module):
    """Drops scores, in evaluation too unless it is told the mode."""

    def __init__(self, *, told: bool) -> None:
        super().__init__()
        self.told = told
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        share = 0.5 if self.training or not self.told else 0.0
        return self.out(functional.scaled_dot_product_attention(x, x, x, dropout_p=share))


class Dropping(nn.Module):
    """Calls dropout itself."""

    def __init__(self, *, told: bool) -> None:
        super().__init__()
        self.told = told
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Drop, in evaluation too unless it is told the mode."""
        return self.out(functional.dropout(x, 0.25, training=self.training or not self.told))


def notes(program: Callable[[], Any], kind: str) -> list[dict[str, Any]]:
    """Run a program watched, with one step in 50 measured; return what was noted of one kind."""
    return [dict(event) for event in watch(program, every=50).events if event["kind"] == kind]


def training(
    model: nn.Module, evaluate: Callable[[nn.Module], None], *, epochs: int = 4
) -> Callable[[], None]:
    """Make a training of eight steps an epoch, with an evaluation after each."""

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(epochs):
            model.train()
            for _ in range(8):
                optimizer.zero_grad()
                model(torch.randn(6, 4)).square().mean().backward()
                optimizer.step()
            evaluate(model)

    return program


def calls(model: nn.Module, *, mode: bool, times: int = 5) -> None:
    """Evaluate a model in a mode."""
    model.train(mode)
    with torch.no_grad():
        for _ in range(times):
            model(torch.randn(6, 4))


def net() -> nn.Sequential:
    """Make a net with a dropout and a batch norm."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))


def test_evaluations_as_in_training_are_counted_in_all_steps() -> None:
    """Hardly any of these steps are measured; the first two passes in a row are counted, too."""
    (note,) = notes(training(net(), lambda model: calls(model, mode=True)), "evaluation")

    assert (note["step"], note["passes"], note["as_training"]) == (8, 20, 20)
    assert note["train"] == ["1", "2"]


def test_evaluations_in_evaluation_mode_are_counted_from_the_first_pass() -> None:
    """There is nothing to say about them."""
    (note,) = notes(training(net(), lambda model: calls(model, mode=False, times=1)), "evaluation")

    assert (note["passes"], note["as_training"], note["train"]) == (4, 0, [])
    assert "dropout" not in note


def test_two_passes_without_gradients_in_training_mode_are_no_evaluation() -> None:
    """Samples of a generator are judged so, before each step."""
    assert (
        notes(training(net(), lambda model: calls(model, mode=True, times=2)), "evaluation") == []
    )


def test_a_pass_with_gradients_of_another_model_ends_the_row() -> None:
    """A critic is trained five times on what a generator returns without gradients."""
    generator = net()
    critic = nn.Linear(2, 1)

    def program() -> None:
        first = torch.optim.SGD(generator.parameters(), 0.01)
        second = torch.optim.SGD(critic.parameters(), 0.01)
        for _ in range(6):
            for _ in range(5):
                with torch.no_grad():
                    made = generator(torch.randn(6, 4))
                second.zero_grad()
                critic(made).mean().backward()
                second.step()
            first.zero_grad()
            critic(generator(torch.randn(6, 4))).mean().backward()
            first.step()

    assert notes(program, "evaluation") == []


@pytest.mark.parametrize("kind", [Attention, Dropping])
def test_dropout_that_is_active_in_evaluation_mode_is_noted(kind: Any) -> None:
    """With its module, line and share; none where it is told the mode."""
    model = nn.Sequential(nn.Linear(4, 4), kind(told=False))
    (note,) = notes(training(model, lambda model: calls(model, mode=False)), "evaluation")
    (call,) = note["dropout"]
    told = nn.Sequential(nn.Linear(4, 4), kind(told=True))
    (healthy,) = notes(training(told, lambda model: calls(model, mode=False)), "evaluation")

    assert call["module"] == "1"
    assert call["share"] == (0.5 if kind is Attention else 0.25)
    assert call["text"].startswith("return ")
    assert "dropout" not in healthy


def test_looking_at_dropout_changes_no_bit() -> None:
    """It draws the same numbers."""
    model = nn.Sequential(nn.Linear(4, 4), Dropping(told=False))
    outputs: list[Tensor] = []

    def evaluate(model: nn.Module) -> None:
        model.eval()
        with torch.no_grad():
            outputs.append(model(torch.ones(6, 4)))

    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    training(model, evaluate)()
    plain, outputs[:] = list(outputs), []
    model.load_state_dict(state)
    torch.manual_seed(0)
    watch(training(model, evaluate), every=50)

    assert all(map(torch.equal, plain, outputs))


def test_an_interrupted_evaluation_leaves_no_mode_and_no_hook() -> None:
    """Python's interrupt passes the forward hook that ends a look."""
    model = nn.Sequential(nn.Linear(4, 4), Dropping(told=False))
    handles = []

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def evaluate(model: nn.Module) -> None:
        handles.append(model[1].register_forward_pre_hook(interrupt))
        with contextlib.suppress(KeyboardInterrupt):
            calls(model, mode=False)
        handles.pop().remove()

    before = modes.function_modes()
    watch(training(model, evaluate), every=50)

    assert modes.function_modes() == before
    assert not before_forward(model)
    assert not after_forward(model)


def test_inputs_that_stay_the_same_are_noted_with_the_loaders() -> None:
    """Those that are drawn anew are not, and neither is one changed element."""
    loader = DataLoader(TensorDataset(torch.arange(32.0).reshape(8, 4)), batch_size=2)
    same = torch.ones(6, 4)

    def given(batches: Callable[[int], Tensor]) -> list[dict[str, Any]]:
        model = nn.Linear(4, 2)

        def program() -> None:
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            for step in range(20):
                optimizer.zero_grad()
                model(batches(step)).square().mean().backward()
                optimizer.step()

        events = watch(program, every=1).events
        return [dict(event) for event in events if event["kind"] == "repeated-inputs"]

    (note,) = given(lambda _: next(iter(loader))[0])
    assert (note["root"], note["batch"], note["compared"]) == (0, 2, 18)
    assert {"batch_size": 2, "batches": 4} in note["loaders"]
    assert [note["batch"] for note in given(lambda _: same)] == [6]
    assert given(lambda _: torch.randn(6, 4)) == []
    assert given(lambda step: same + torch.eye(6, 4) * (step == 12)) == []


def test_learning_rates_are_noted_whenever_they_change() -> None:
    """In measured steps, for each group; one that is no number is not known."""
    model = nn.Linear(4, 2)

    def program() -> None:
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(0.5)}]
        optimizer = torch.optim.SGD(groups, 0.01)
        for step in range(6):
            optimizer.param_groups[0]["lr"] = 0.01 if step < 3 else 0.0
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()

    events = watch(program, every=1).events
    noted = [dict(event) for event in events if event["kind"] == "learning-rates"]
    assert [(note["step"], note["rates"]) for note in noted] == [(0, [0.01, 0.5]), (3, [0.0, 0.5])]


def test_the_sizes_of_evaluated_outputs_are_noted_with_what_estimates() -> None:
    """One in each evaluation, and one before the training; those in training mode are not.

    Until an optimizer steps, the two passes before are steps.
    """
    model = net()
    calls(model, mode=False)

    def program() -> None:
        calls(model, mode=False, times=2)
        training(model, lambda model: calls(model, mode=False), epochs=3)()

    (note,) = notes(program, "evaluated-outputs")

    assert note["estimates"] == ["1"]
    assert [each["step"] for each in note["sizes"]] == [1, 10, 18, 26]
    assert {each["site"] for each in note["sizes"]} == {":out"}
    with torch.no_grad():
        largest = max(model(torch.randn(60, 4)).square().mean().sqrt() for _ in range(20))
    assert 0 < note["sizes"][-1]["rms"] < 2 * largest
    assert notes(training(net(), lambda model: calls(model, mode=True)), "evaluated-outputs") == []


@pytest.mark.parametrize(("momentum", "initial"), [(0.1, []), (0.0, ["1"])])
def test_statistics_that_were_never_updated_are_noted(momentum: float, initial: list[str]) -> None:
    """In the last evaluation; the model may be gone at the end."""

    def program() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum))
        training(model, lambda model: calls(model, mode=False))()

    (note,) = notes(program, "evaluated-outputs")

    assert note.get("initial", []) == initial


def test_those_of_a_copy_that_is_not_trained_are_noted_as_well() -> None:
    """Only where they were never updated, and again after twice as many steps."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def evaluating(copied: nn.Module) -> list[dict[str, Any]]:
        trains = training(model, lambda _: calls(copied, mode=False, times=1), epochs=14)
        return [note for note in notes(trains, "evaluated-outputs") if note["root"] == 1]

    (note,) = evaluating(copy.deepcopy(model))
    assert note["initial"] == ["copied.1"]
    assert [each["step"] for each in note["sizes"]] == [16, 24, 48, 96]
    assert evaluating(nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4))) == []
    assert evaluating(nn.BatchNorm1d(4, track_running_stats=False)) == []


@pytest.mark.parametrize("norm", ["hook", "parametrization"])
def test_a_spectral_norm_is_an_estimate(norm: str) -> None:
    """PyTorch has two."""
    add: Any = nn.utils.spectral_norm if norm == "hook" else parametrizations.spectral_norm
    model = nn.Sequential(nn.Linear(4, 4), add(nn.Linear(4, 2)))

    (note,) = notes(training(model, lambda model: calls(model, mode=False)), "evaluated-outputs")

    assert all(path.startswith("1") for path in note["estimates"])
    assert len(note["estimates"]) == 1


class TwoInputs(nn.Module):
    """Adds the embedding of a text to an image."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Embedding(8, 4)
        self.image = nn.Linear(4, 4)

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        """Add both."""
        return self.text(ids).mean(1) + self.image(image)


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (lambda step: torch.full((1, 3), step // 2 % 8), [("ids", 6, ["0"])]),
        (lambda step: torch.full((6, 3), step % 8), []),
        (lambda step: torch.full((1, 3), 5), []),
        (lambda step: torch.full((1, 6), step % 8), []),
    ],
    ids=["one sample", "a batch", "the same for all steps", "the batch in the second place"],
)
def test_one_sample_beside_a_batch_is_noted_if_it_changes(texts: Any, wanted: Any) -> None:
    """It changes in every second step here."""
    model = TwoInputs()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(12):
            optimizer.zero_grad()
            model(torch.randn(6, 4), ids=texts(step)).square().mean().backward()
            optimizer.step()

    events = [dict(e) for e in watch(program, every=1).events if e["kind"] == "batch-sizes"]
    assert [(e["input"], e["batch"], e["others"]) for e in events] == wanted


def test_a_mode_of_the_program_stays_through_its_evaluations() -> None:
    """As `torch.set_default_device` has one; the looks are put on top of it and taken off."""
    depths = []

    def evaluate(model: nn.Module) -> None:
        calls(model, mode=False)
        depths.append(modes.function_modes())

    before = modes.function_modes()

    def program() -> None:
        with torch.device("cpu"):
            training(nn.Sequential(Dropping(told=False)), evaluate)()

    (note,) = notes(program, "evaluation")

    assert len(note["dropout"]) == 1
    assert depths == [before + 1] * 4
    assert modes.function_modes() == before


class Stream(IterableDataset[Tensor]):
    """Samples that each worker runs through as a whole, or shares with the others."""

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the samples."""
        info = get_worker_info()
        assert info is not None
        for i in range(48):
            if not self.shared or i % info.num_workers == info.id:
                yield torch.arange(4.0) + i


def learn_from(batches: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Train on batches, one a step; return what was noted of batches that came several times."""
    model = nn.Linear(4, 2)

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        for thread in threading.enumerate():  # a loader that has ended does not wait for its own
            if thread.name == "QueueFeederThread":
                thread.join()

    return notes(program, "repeated-batches")


@pytest.mark.parametrize("shared", [False, True])
def test_workers_that_run_through_a_whole_stream_are_noted(shared: bool) -> None:
    """Each batch comes as often as there are workers, in steps that are not measured, too."""
    loader = DataLoader(Stream(shared=shared), batch_size=2, num_workers=2)
    noted = learn_from(loader)
    if shared:
        assert noted == []
    else:
        (note,) = noted
        assert (note["times"], note["loaders"]) == (2, [{"workers": 2, "stream": True}])
        assert note["batches"] >= 20


def groups_of(*lengths: int) -> list[Tensor]:
    """Make groups of equal batches."""
    return [torch.ones(2, 4) * i for i, length in enumerate(lengths) for _ in range(length)]


@pytest.mark.parametrize(
    ("lengths", "workers", "times"),
    [
        ((3, 3, 3, 3, 3, 3), 4, [3]),
        ((3, 3, 3, 2, 3, 3), 4, []),
        ((3, 3, 3, 3, 3, 3), 0, []),
        ((1,) * 20, 4, []),
        ((30,), 4, []),
        ((5, 5, 5, 5), 4, []),
    ],
    ids=["groups", "uneven", "no workers", "all different", "all the same", "too few groups"],
)
def test_groups_of_equal_batches_are_counted(
    lengths: tuple[int, ...], workers: int, times: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where all are as long, and there are workers; without a loader the processes count."""
    processes = SimpleNamespace(active_children=lambda: [None] * workers)
    monkeypatch.setattr(repeated_batches, "multiprocessing", processes)

    noted = learn_from(groups_of(*lengths))

    assert [note["times"] for note in noted] == times
    for note in noted:
        assert note["loaders"] == [{"workers": workers, "stream": None}]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_evaluations_take_the_fused_path_of_encoders() -> None:
    """A mode would keep PyTorch from it: it leaves out what is padded."""
    padding = torch.zeros(4, 8, dtype=torch.bool)
    padding[:, 5:] = True

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)

        def forward(self, tokens: Tensor) -> Tensor:
            found: Tensor = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
            return found

    model = Model()
    left: list[float] = []

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(4):
            tokens = torch.randint(0, 16, (4, 8))
            model.train()(tokens).sum().backward()
            optimizer.step()
            with torch.no_grad():
                left.append(float(model.eval()(tokens)[:, 5:].abs().sum()))

    watch(program, every=1)
    assert left == [0.0] * 4
