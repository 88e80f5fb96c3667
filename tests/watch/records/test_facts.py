"""Facts about a training that its numbers do not show: each is noted where it holds, and not where it does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from kedge.rules.training.eval_mode import EvalMode
from kedge.sites.modal import asks_for_mode
from tests.watch.watched import descend, net, watch


def notes(program: Callable[[], Any], kind: str, *, every: int = 1) -> list[dict[str, Any]]:
    """Run a program watched; return what was noted of one kind."""
    return [dict(event) for event in watch(program, every=every).events if event["kind"] == kind]


def training(
    model: nn.Module,
    held: list[nn.Parameter] | None = None,
    *,
    zero: bool = True,
    passes: int = 1,
    batch: int = 6,
) -> Callable[[], None]:
    """Make a training of five steps, of some parameters, each of some passes."""

    def program() -> None:
        optimizer = torch.optim.SGD(list(model.parameters()) if held is None else held, 0.01)
        for _ in range(5):
            if zero:
                optimizer.zero_grad()
            for _ in range(passes):
                model(torch.randn(batch, 4)).square().mean().backward()
            optimizer.step()

    return program


def test_parameters_that_no_optimizer_holds_are_noted() -> None:
    """With their number of elements, and whether they had a gradient; nothing where all are held."""
    model = net()
    (note,) = notes(training(model, list(model[0].parameters())), "not-optimized")
    assert (note["root"], note["unheld"], note["unheld_elements"]) == (
        0,
        ["2.weight", "2.bias"],
        18,
    )
    assert (note["graded"], "replaced" in note) == (["2.weight", "2.bias"], False)
    assert notes(training(net()), "not-optimized") == []


def test_a_parameter_that_was_replaced_after_the_optimizer_was_made_is_noted() -> None:
    """The optimizer holds the old one, which the model has no more."""
    model = net()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(5):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
            if step == 1:
                model[2].weight = nn.Parameter(model[2].weight.detach().clone())

    (note,) = notes(program, "not-optimized")
    assert (note["unheld"], note["replaced"]) == (["2.weight"], ["2.weight"])


@pytest.mark.parametrize("way", ["copies now and then", "averages in every step", "never"])
def test_a_copy_of_a_model_that_the_program_writes_is_not_noted(way: str) -> None:
    """A target network whose output is not detached gets gradients, and its weights are those of another model."""
    model, target = net(), net()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(9):
            x = torch.randn(6, 4)
            optimizer.zero_grad()
            (model(x) - 1 - 0.9 * target(x)).square().mean().backward()
            optimizer.step()
            if way == "copies now and then" and step % 4 == 3:
                target.load_state_dict(model.state_dict())
            if way == "averages in every step":
                for mean, param in zip(target.parameters(), model.parameters(), strict=True):
                    mean.data.copy_(0.9 * mean.data + 0.1 * param.data)

    unheld = [note["unheld"] for note in notes(program, "not-optimized", every=2)]
    expected = []
    if way == "never":
        expected = [["target.0.weight", "target.0.bias"]]
    assert [each[:2] for each in unheld] == expected


def test_what_a_new_optimizer_holds_or_the_model_has_no_more_was_not_lost() -> None:
    """Between two phases all parameters are replaced, or a layer is taken away; the first optimizer still exists."""

    def phases(change: Callable[[nn.Module], None]) -> Callable[[], None]:
        model = net()

        def program() -> None:
            first = torch.optim.SGD(model.parameters(), 0.01)
            model(torch.randn(6, 4)).square().mean().backward()
            first.step()
            change(model)
            training(model)()
            assert first.param_groups  # it lives on

        return program

    def replace_all(model: nn.Module) -> None:
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(param.detach().clone()))

    def take_the_head(model: nn.Module) -> None:
        model[2] = nn.Identity()

    for change in (replace_all, take_the_head):
        assert notes(phases(change), "not-optimized") == []


def test_a_model_that_gets_gradients_and_no_optimizer_has_is_noted() -> None:
    """An encoder whose decoder alone was given to the optimizer; a model without gradients is left alone."""
    encoder, decoder, teacher = nn.Linear(4, 4), nn.Linear(4, 1), net()

    def program() -> None:
        optimizer = torch.optim.SGD(decoder.parameters(), 0.01)
        for _ in range(20):
            optimizer.zero_grad()
            x = torch.randn(6, 4)
            with torch.no_grad():
                teacher(x)
            decoder(encoder(x)).square().mean().backward()
            optimizer.step()

    (note,) = notes(program, "not-optimized")
    assert (note["unheld"], note["graded"]) == (
        ["encoder.weight", "encoder.bias"],
        ["encoder.weight", "encoder.bias"],
    )
    assert note["passes"] == 16  # when it was looked at last, as the optimizer is gone at the end


def test_a_model_whose_optimizer_is_gone_is_not_missed() -> None:
    """It was held as long as it was trained, as each model of an ensemble."""
    models = [net() for _ in range(3)]

    def program() -> None:
        for model in models:
            training(model)()

    assert notes(program, "not-optimized") == []


def test_modules_in_a_list_and_tensors_that_are_no_parameters_are_noted() -> None:
    """Both get gradients, and `parameters()` has neither."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.blocks = (
                nn.Linear(4, 1),
                [nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)],
            )
            self.scale, self.fixed = torch.ones(4, requires_grad=True), torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) * self.scale * self.fixed
            return self.head(x)

    model = Model()
    (note,) = notes(training(model), "not-optimized")
    assert (note["outside"], note["tensors"], note.get("unheld", [])) == (
        ["Sequential", "Linear"],
        ["scale"],
        [],
    )
    model = Model()
    held = [
        *model.parameters(),
        *model.blocks[0].parameters(),
        *model.blocks[1].parameters(),
        model.scale,
    ]
    assert notes(training(model, held), "not-optimized") == []


def test_a_parameter_that_nothing_used_is_noted_though_its_model_is_gone() -> None:
    """A function that trained it has returned."""

    def program() -> None:
        model = net()
        model.register_parameter("spare", nn.Parameter(torch.ones(4)))
        training(model)()

    (note,) = notes(program, "ledger")
    assert [site["site"] for site in note["sites"]] == ["spare:param.grad"]


def test_an_optimizer_that_never_steps_is_noted() -> None:
    """With the backward passes that were in vain; not if the program changes the model itself, nor in evaluation mode."""
    model = net()

    def program(*, by_hand: bool = False) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            for p in model.parameters() if by_hand else ():
                p.data -= 0.01 * p.grad

    (note,) = notes(program, "not-optimized")
    assert (note["root"], note["in_vain"]) == (None, 10)
    assert notes(lambda: program(by_hand=True), "not-optimized") == []
    model.eval()
    assert notes(program, "not-optimized") == []


def test_frozen_parameters_are_not_missed() -> None:
    """What needs no gradient is in no optimizer by intent."""
    model = net()
    model[2].requires_grad_(False)
    assert notes(training(model, list(model[0].parameters())), "not-optimized") == []


def test_gradients_that_are_not_zeroed_are_noted() -> None:
    """An accumulation over several passes is none, and neither is a training that zeroes them."""
    kept = notes(training(net(), zero=False), "grads-kept")
    assert kept
    assert all(note["kept"] == note["checked"] > 0 for note in kept)
    assert min(note["step"] for note in kept) == 1
    assert notes(training(net()), "grads-kept") == []
    assert notes(training(net(), passes=3), "grads-kept") == []


def test_modes_are_noted_at_first_and_when_they_change() -> None:
    """Which dropouts and norms were in which mode in a step that trained."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(6):
            model.train(step < 3)
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()

    first, second = notes(program, "modes")
    assert (first["training"], first["train"], first["eval"]) == (True, ["1", "2"], [])
    assert (second["step"], second["training"], second["train"], second["eval"]) == (
        3,
        False,
        [],
        ["1", "2"],
    )


def test_the_mode_of_a_module_that_is_added_or_replaced_later_is_noted() -> None:
    """A dropout in evaluation mode that a model gets while it is trained, as a new module and in another's place."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Identity())

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(6):
            if step == 2:
                model.append(nn.Dropout(0.5).eval())
            if step == 4:
                model[1] = nn.Dropout(0.5)
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()

    first, second, third = notes(program, "modes")
    assert (first["train"], first["eval"]) == ([], [])
    assert (second["step"], second["train"], second["eval"]) == (2, [], ["2"])
    assert (third["step"], third["train"], third["eval"]) == (4, ["1"], ["2"])


def test_each_optimizer_is_described_at_the_end() -> None:
    """Its type, its steps, its parameters and its rate."""
    (note,) = notes(training(net()), "optimizers")
    (optimizer,) = note["optimizers"]
    assert (optimizer["type"], optimizer["steps"], optimizer["parameters"]) == ("SGD", 5, 4)
    assert (optimizer["roots"], optimizer["rates"], optimizer["first_step"]) == ([0], [0.01], 0)


def test_training_in_forked_children_is_said() -> None:
    """What a child process trains is not recorded, and the recording says that it took place."""

    def program() -> None:
        descend(net(), 3)
        child = os.fork()
        if not child:
            try:
                descend(net(), 2)
            finally:
                os._exit(0)
        os.waitpid(child, 0)

    seen = [e for e in watch(program, every=1).events if e["kind"] == "unseen"]
    assert [(e["what"], e["detail"]["steps"]) for e in seen] == [("children", 2)]


def test_a_global_table_of_hooks_that_the_program_clears_is_said() -> None:
    """From then on nobody tells Kedge of an optimizer's step."""

    def program() -> None:
        descend(net(), 3)
        optimizers._global_optimizer_post_hooks.clear()
        descend(net(), 3)

    events = watch(program, every=1).events
    assert [e["what"] for e in events if e["kind"] == "unseen"] == ["hook-tables"]
    assert not [
        e for e in watch(lambda: descend(net(), 3), every=1).events if e["kind"] == "unseen"
    ]


def test_sparse_gradients_and_odd_rates_end_no_watching() -> None:
    """Neither the search for gradients that are kept, nor the recorded learning rates; and any size can be recorded."""
    table, rest = (
        nn.Embedding(5, 3, sparse=True),
        nn.ParameterList([torch.ones(1).expand(2**62) for _ in range(3)]),
    )
    table.rest = rest

    def program() -> None:
        optimizer = torch.optim.SGD([{"params": [table.weight], "lr": 0.1}], 0.01)
        other = torch.optim.SGD([nn.Parameter(torch.ones(1))], float("nan"))
        for _ in range(5):
            optimizer.zero_grad()
            table(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
            other.step()

    log = watch(program, every=1, sites="weight")
    assert not log.watch.failed
    assert [
        each["rates"] for e in log.events if e["kind"] == "optimizers" for each in e["optimizers"]
    ] == [[0.1], []]


class Stacked(nn.Module):
    """A body of several layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the head."""
        return self.head(self.body(x))


def test_a_frozen_body_of_fresh_layers_is_noted() -> None:
    """With the elements of each part, and those of the evenly spread weights; a few elements are not judged."""
    model = Stacked()
    model.body.requires_grad_(False)
    (note,) = notes(training(model), "frozen")

    assert (note["root"], note["frozen"], note["elements"]) == (0, 4480, 4610)
    assert (note["weights"], note["even"], note["beside"]) == (4352, 4352, 0)
    assert note["parts"] == [
        {"path": "body", "elements": 4480, "frozen": 4480},
        {"path": "head", "elements": 130, "frozen": 0},
    ]


def test_frozen_weights_with_the_spread_of_trained_ones_are_not_even() -> None:
    """Bell-shaped weights may be pretrained ones."""
    model = Stacked()
    for param in model.body.parameters():
        nn.init.normal_(param.requires_grad_(False), std=0.02)
    (note,) = notes(training(model), "frozen")

    assert (note["weights"], note["even"]) == (4352, 0)


def test_a_model_that_trains_is_not_noted_as_frozen() -> None:
    """Neither a whole one, nor one whose body is frozen at the end of the run or in its first steps."""
    assert notes(training(Stacked()), "frozen") == []

    for frozen_first in (True, False):
        model = Stacked()

        def program(model: Stacked = model, frozen_first: bool = frozen_first) -> None:
            model.body.requires_grad_(not frozen_first)
            training(model)()
            model.body.requires_grad_(frozen_first)
            training(model)()

        assert notes(program, "frozen") == []


class Adapted(nn.Module):
    """A frozen layer with a small one beside it that trains."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of both."""
        return self.base(x) + self.up(self.down(x))


def test_frozen_weights_beside_trained_ones_are_counted() -> None:
    """Adapters stand there."""
    model = Stacked()
    model.body.requires_grad_(False)
    model.head = Adapted(model.head)
    (note,) = notes(training(model), "frozen")

    assert (note["frozen"], note["beside"]) == (4610, 130)


def test_a_sparse_gradient_is_measured_as_a_dense_one() -> None:
    """A table of words has the same gradients with ``sparse=True``: the rules judge it as any other."""

    def gradients(*, sparse: bool) -> list[tuple[int, int, float]]:
        torch.manual_seed(0)
        table = nn.Embedding(6, 3, sparse=sparse)

        def program() -> None:
            optimizer = torch.optim.SGD(table.parameters(), 0.1)
            for _ in range(3):
                optimizer.zero_grad()
                table(torch.tensor([1, 2, 2])).square().sum().backward()
                optimizer.step()

        recording = watch(program, every=1).recording()
        (site,) = recording.of_kind("param.grad")
        rows = recording.rows(site)
        columns = (rows.count, rows.nonzero, rows.sumsq)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    dense = gradients(sparse=False)
    assert gradients(sparse=True) == [pytest.approx(row) for row in dense]
    assert [(count, nonzero) for count, nonzero, _ in dense] == [(18, 6)] * 3


class Gate(nn.Module):
    """A layer that drops by a function, which is told the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.fc(x), 0.5, training=self.training)


def test_the_mode_of_what_reads_it_in_its_forward_is_noted() -> None:
    """A dropout that is a function, and no module, is off in evaluation mode as well."""
    model = nn.Sequential(Gate(), nn.ReLU()).eval()
    (note,) = notes(training(model), "modes")
    assert (note["eval"], note["train"]) == (["0"], [])

    (finding,) = EvalMode().check(watch(training(Gate().eval()), every=1).recording())
    said = "measured steps of its training: Gate does not work as in training."
    assert said in finding.message
    assert not list(EvalMode().check(watch(training(Gate()), every=1).recording()))


def test_the_mode_of_an_installed_library_is_not_noted_for_its_forward() -> None:
    """It reads the mode for much else: for a checkpoint of activations, or for a dropout of zero."""
    assert asks_for_mode(Gate)
    assert not asks_for_mode(nn.MultiheadAttention)
    assert not asks_for_mode(nn.Linear)


class Wrapper(torch.optim.Optimizer):
    """Steps by another optimizer with the same groups."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.01})
        self.base = torch.optim.SGD(params, 0.01)

    def step(self, closure: None = None) -> None:
        """Step."""
        self.base.step()


def with_two(
    *, shared: bool = True, again: bool = False, later: bool = False, wrapped: bool = False
) -> list[dict[str, Any]]:
    """Train a model with two optimizers; return what was noted of parameters that both hold."""
    model = net()

    def program() -> None:
        params = list(model.parameters())
        one: torch.optim.Optimizer = torch.optim.Adam(params if shared else params[:2], 1e-3)
        if wrapped:
            one = Wrapper(params)
        other = torch.optim.SGD(params[2:], 0.01)
        for i in range(8):
            one.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            if not later or i < 4:
                one.step()
            if again:
                other.zero_grad()
                model(torch.randn(6, 4)).square().mean().backward()
            if not (wrapped or (later and i < 4)):
                other.step()

    return notes(program, "shared-parameters")


def test_two_optimizers_that_use_the_same_gradients_are_noted() -> None:
    """With the parameters that both hold."""
    (note,) = with_two()

    assert (note["optimizers"], note["parameters"]) == ([0, 1], ["2.weight", "2.bias"])
    assert (note["count"], note["same"]) == (2, note["compared"])
    assert note["same"] >= 5


def test_gradients_of_its_own_are_not_the_same() -> None:
    """A backward pass stands between both steps."""
    (note,) = with_two(again=True)

    assert (note["same"], note["compared"] >= 5) == (0, True)


@pytest.mark.parametrize("case", ["apart", "later", "wrapped"])
def test_optimizers_that_do_not_meet_are_not_noted(case: str) -> None:
    """They hold other parameters, one takes over from the other, or one works by the other."""
    assert with_two(shared=case != "apart", later=case == "later", wrapped=case == "wrapped") == []
