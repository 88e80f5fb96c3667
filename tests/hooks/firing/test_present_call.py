"""What an event shows of its call: the module, its inputs and its output, while the action runs and no longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.errors import ActionError, EventError
from kedge.flow import Event


class Net(nn.Module):
    """A module with inputs by position and by name, and a structured output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        out, _ = self.lstm(self.fc(x) * scale)
        return torch.relu(out)


def asked(
    model: nn.Module, selector: str, read: Callable[[Event], Any], *, backward: bool = False
) -> list[Any]:
    """Return what an action reads of each event of a call of the model."""
    found: list[Any] = []
    with kedge.hook(model, selector, lambda value, event: found.append(read(event))):
        out = model(torch.ones(2, 1, 4), scale=2.0)
        if backward:
            out.sum().backward()
    return found


@pytest.mark.parametrize("kind", [":in", ":out", ":out.grad", ":in.grad", ":in.share", ":saved"])
def test_an_event_of_a_module_has_the_module(kind: str) -> None:
    """In the forward and in the backward."""
    model = Net()
    assert set(asked(model, f"lstm{kind}", lambda event: event.module, backward=True)) == {
        model.lstm
    }


@pytest.mark.parametrize("kind", [":param", ":param.grad", ":param.acc"])
def test_an_event_of_a_parameter_has_the_module_that_owns_it(kind: str) -> None:
    """Whichever module of the model that is."""
    model = Net()
    assert asked(model, f"fc.weight{kind}", lambda event: event.module, backward=True) == [model.fc]


def test_an_event_of_an_operation_has_the_module_whose_forward_runs() -> None:
    """And its inputs, but not its output, which is still to come."""
    model = Net()
    assert asked(model, "/relu:out", lambda event: (event.module, event.kwargs)) == [
        (model, {"scale": 2.0})
    ]
    with pytest.raises(ActionError, match=r'exists only at ":out" of a module'):
        asked(model, "/relu:out", lambda event: event.output)


@pytest.mark.parametrize("kind", [":in", ":out", ":saved"])
def test_the_inputs_of_the_call_are_those_that_the_module_received(kind: str) -> None:
    """By position and by name."""
    for args, kwargs in asked(Net(), kind, lambda event: (event.args, event.kwargs)):
        assert torch.equal(args[0], torch.ones(2, 1, 4))
        assert kwargs == {"scale": 2.0}


def test_the_output_is_the_whole_of_it_with_the_edits_so_far() -> None:
    """At each of its tensors, and also if it is one tensor."""
    model, seen = Net(), []
    with kedge.hook(model, "lstm", kedge.zero(), lambda value, event: seen.append(event.output)):
        out = model(torch.ones(2, 1, 4))
    assert [bool(part.any()) for part in (out,)] == [False]
    first, last = seen[0], seen[-1]
    assert (isinstance(last, tuple), len(seen)) == (True, 3)
    assert [bool(t.any()) for t in (first[0], last[0], last[1][0], last[1][1])] == [False] * 4
    assert first[1][1].any()  # its turn comes later

    seen.clear()
    with kedge.hook(
        model, "fc", kedge.scale(0), lambda value, event: seen.append(event.output is value)
    ):
        model(torch.ones(2, 1, 4))
    assert seen == [True]


def test_the_inputs_at_in_have_the_edits_so_far() -> None:
    """The module then receives them."""
    model, seen = Net(), []
    with kedge.hook(model, "fc:in", kedge.zero(), lambda value, event: seen.append(event.args[0])):
        model(torch.ones(2, 1, 4))
    assert not seen[0].any()


def test_a_gradient_has_no_inputs_and_no_output() -> None:
    """The call is over when it arrives."""
    for what, read in (
        ("event.args", lambda e: e.args),
        ("event.args", lambda e: e.kwargs),
        ("event.output", lambda e: e.output),
    ):
        with pytest.raises(ActionError, match=what):
            asked(Net(), "fc:out.grad", read, backward=True)


def test_a_tensor_belongs_to_no_module() -> None:
    """Nor does an autograd node."""
    x = torch.ones(3, requires_grad=True)
    y = (x * 2).sum()
    for target in (x, y.grad_fn):
        with (
            pytest.raises(ActionError, match="belongs to no module"),
            kedge.hook(target, lambda g, event: event.module),
        ):
            y.backward(retain_graph=True)


def test_after_the_action_nothing_can_be_asked() -> None:
    """Nor by another action that runs then."""
    events: list[Event] = []
    model = Net()
    with kedge.hook(model, "fc", lambda value, event: events.append(event)):
        model(torch.ones(2, 1, 4))
    for name in ("module", "args", "kwargs", "output"):
        with pytest.raises(
            EventError, match=rf"event\.{name} of fc:out was read after its action had returned"
        ):
            getattr(events[0], name)
    with pytest.raises(ActionError, match="read after its action"):
        asked(model, "fc", lambda event: events[0].module)


def test_an_event_keeps_no_value_alive() -> None:
    """Asked or not: the output of a call whose events are kept is freed."""
    events: list[Event] = []
    refs: list[Any] = []
    model = Net()

    def act(value: Tensor, event: Event) -> None:
        refs.append(weakref.ref(event.output))
        events.append(event)

    with kedge.hook(model, "fc", act):
        model(torch.ones(2, 1, 4))
        gc.collect()
        assert len(events) == 1
        assert refs[0]() is None


def test_a_call_inside_an_action_is_told_apart() -> None:
    """Each event has its own module, also while another model's action runs."""
    model, other, seen = Net(), Net(), []

    def inner(value: Tensor, event: Event) -> None:
        seen.append(event.module)

    def outer(value: Tensor, event: Event) -> None:
        with kedge.hook(other, "fc", inner):
            other(torch.ones(2, 1, 4))
        seen.append(event.module)
        seen.append(event.output is value)

    with kedge.hook(model, "fc", outer):
        model(torch.ones(2, 1, 4))
    assert seen == [other.fc, model.fc, True]


def test_each_of_several_models_of_a_session_has_its_own_modules() -> None:
    """For values, gradients and parameters alike, also where the models are found at their first calls."""
    first, second, seen = Net(), Net(), []
    with kedge.session() as s:
        s.hook(
            first,
            "fc:out.grad, fc.weight:param.grad",
            lambda value, event: seen.append(event.module),
        )
        s.hook(
            second,
            "fc:out.grad, fc.weight:param.grad",
            lambda value, event: seen.append(event.module),
        )
        s.hook("fc:out.grad, fc.bias:param.grad", lambda value, event: seen.append(event.module))
        for model in (second, first):
            model(torch.ones(2, 1, 4)).sum().backward()
    assert seen == [second.fc] * 4 + [first.fc] * 4


def test_a_recompute_has_its_call() -> None:
    """A checkpoint calls the module again, in the backward."""
    fc, seen = nn.Linear(4, 4), []

    class Act:
        observes = recomputes = True

        def __call__(self, value: Tensor, event: Event) -> None:
            seen.append((event.recompute, event.module, event.args[0].shape))

    model = nn.Sequential(fc, nn.ReLU())
    with kedge.hook(model, "0", Act()):
        checkpoint(
            model, torch.ones(2, 4, requires_grad=True), use_reentrant=False
        ).sum().backward()
    assert seen == [(False, fc, (2, 4)), (True, fc, (2, 4))]


def test_compiled_code_has_the_module_but_no_call(compiled: Callable[..., Any]) -> None:
    """An observer runs in one operator of the graph."""
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), []

    class Act:
        observes = True

        def __call__(self, value: Tensor, event: Event) -> None:
            seen.append(event.module)
            with pytest.raises(EventError, match="compiled"):
                event.args
            with pytest.raises(EventError, match="compiled"):
                event.output

    with kedge.hook(model, "0", Act()):
        compiled(model, backend="eager")(torch.ones(2, 4))
    assert seen == [model[0]]


def test_a_replica_is_the_module_of_its_call() -> None:
    """`DataParallel` calls copies; without a device here, one is made as it makes them."""
    model = nn.Sequential(nn.Linear(4, 4))
    seen: list[Any] = []
    with kedge.hook(
        model, "0", lambda value, event: seen.append((event.module, event.args[0].shape))
    ):
        replica = model[0]._replicate_for_data_parallel()
        replica.weight, replica.bias = model[0].weight, model[0].bias
        replica(torch.ones(2, 4))
    assert seen == [(replica, (2, 4))]


@pytest.mark.parametrize(
    ("selector", "action"),
    [
        (":out", kedge.from_hook(lambda module, args, output: None)),
        (":in", kedge.from_hook(lambda module, args: None)),
        (":out.grad, weight:param.grad, **:saved", lambda value, event: (event.module, None)[1]),
        ("/linear", lambda value, event: (event.module, event.args, None)[2]),
    ],
)
def test_the_program_s_variables_are_not_kept(selector: str, action: Callable[..., Any]) -> None:
    """What its functions hold while an action asks for the call is freed when they drop it."""
    model = nn.Linear(4, 4)

    def program() -> list[Any]:
        x = torch.randn(3, 4)
        loss = model(x).sum()
        loss.backward()
        refs = [weakref.ref(x), weakref.ref(loss)]
        del x, loss
        return [ref() for ref in refs]

    gc.collect()
    gc.disable()
    try:
        with kedge.hook(model, selector, action):
            assert program() == [None, None]
    finally:
        gc.enable()


def test_all_tensors_of_a_call_are_of_one_pass() -> None:
    """Also if an action at the first of them calls the model again."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + 0, x + 1

    model, depth, seen = Two(), [], []

    def act(value: Tensor, event: Event) -> None:
        seen.append((event.site.leaf, event.pass_, event.call))
        if not depth:
            depth.append(1)
            model(value)

    with kedge.hook(model, ":out", act):
        model(torch.ones(2))
    assert seen == [("0", 0, 0), ("0", 1, 0), ("1", 1, 0), ("1", 0, 0)]


class Zeroing(nn.Module):
    """A module that overwrites its input without saying so."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x.zero_()
        return x + 1


IN_PLACE = [
    nn.ReLU(inplace=True),
    nn.Dropout(1.0, inplace=True),
    nn.Threshold(9.0, 0.0, inplace=True),
]


@pytest.mark.parametrize("without", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("module", IN_PLACE, ids=repr)
def test_the_inputs_of_an_in_place_module_are_those_that_it_was_given(
    module: nn.Module, without: Any
) -> None:
    """event.args and the args of a hook of PyTorch's kind are the input before the call, though the module overwrites it."""
    model, seen = nn.Sequential(module), []
    x = torch.tensor([1.5, -2.0])
    with kedge.session() as s, without():
        s.hook(model, "0", lambda value, event: seen.append(event.args[0]))
        s.hook(model, "0", kedge.from_hook(lambda module, args, out: seen.append(args[0])))
        given = x.clone()
        out = model(given)
    assert len(seen) == 2
    assert all(torch.equal(each, x) for each in seen)
    assert out is given
    assert not torch.equal(out, x)


def test_an_input_that_a_module_overwrites_unannounced_is_an_error_and_then_copied() -> None:
    """The first call cannot know: reading is an error with the remedy.

    From the next call on the input is copied.
    """
    model, seen = nn.Sequential(Zeroing()), []
    with kedge.session() as s:
        s.hook(model, "0", lambda value, event: seen.append(event.args[0]))
        with pytest.raises(ActionError, match="the module has overwritten its input.*record"):
            model(torch.ones(2))
        model(torch.ones(2))
    assert torch.equal(seen[0], torch.ones(2))


def test_a_hook_that_does_not_use_the_inputs_may_stand_at_any_module() -> None:
    """A hook of PyTorch's kind that ignores its args runs where the module has overwritten them."""
    model = nn.Sequential(Zeroing())
    with kedge.hook(model, "0", kedge.from_hook(lambda module, args, out: out * 2)):
        assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))


def test_inputs_inside_of_structures_and_by_name_are_as_given() -> None:
    """Overwritten tensors in containers and keyword arguments are put back, and others are the program's own."""

    class Masked(nn.Module):
        inplace = True

        def forward(self, batch: dict[str, Tensor], *, mask: Tensor) -> Tensor:
            batch["x"][0] = 0
            mask.fill_(0)
            return batch["x"] * mask

    model, seen = nn.Sequential(Masked()), []
    kept = torch.ones(3)
    with kedge.hook(model[0], ":out", lambda value, event: seen.append((event.args, event.kwargs))):
        model[0]({"x": torch.ones(2), "kept": kept}, mask=torch.ones(2))
    (batch,), kwargs = seen[0]
    assert torch.equal(batch["x"], torch.ones(2))
    assert torch.equal(kwargs["mask"], torch.ones(2))


def test_an_action_that_uses_the_given_input_is_differentiated() -> None:
    """The copy of an overwritten input has the history of the input."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    x = torch.randn(4, 2)
    with kedge.hook(model, "1", lambda value, event: value + event.args[0]):
        model(x).sum().backward()
    found = model[0].weight.grad.clone()
    model.zero_grad()
    before = model[0](x)
    (before.relu() + before).sum().backward()
    assert torch.allclose(found, model[0].weight.grad)


def test_an_operation_shows_the_inputs_that_its_module_was_given() -> None:
    """At an operation, event.args are the inputs of its module, also if an operation before it has overwritten them."""

    class Inside(nn.Module):
        inplace = True

        def forward(self, x: Tensor) -> Tensor:
            x.relu_()
            return torch.tanh(x)

    model, seen = nn.Sequential(Inside()), []
    with kedge.hook(model, "0/tanh", lambda value, event: seen.append(event.args[0])):
        model(torch.tensor([-1.0, 2.0]))
    assert torch.equal(seen[0], torch.tensor([-1.0, 2.0]))


def test_an_action_that_hands_its_event_on_finds_the_inputs_too() -> None:
    """Inputs are kept wherever the code of an action does not show that it reads other things of its event alone."""
    seen: list[Tensor] = []

    def handed_on(value: Tensor, event: Event) -> None:
        seen.extend(given(event))

    def given(event: Event) -> tuple[Any, ...]:
        return event.args

    def inside(value: Tensor, event: Event) -> None:
        def later() -> tuple[Any, ...]:
            return event.args

        seen.extend(later())

    class Called:
        def __call__(self, value: Tensor, event: Event) -> None:
            seen.extend(event.args)

    model, x = nn.Sequential(nn.ReLU(inplace=True)), torch.tensor([1.0, -1.0])
    for action in (handed_on, inside, Called()):
        with kedge.hook(model, "0", action):
            model(x.clone())
    assert len(seen) == 3
    assert all(torch.equal(each, x) for each in seen)


def test_an_action_that_asks_for_no_inputs_costs_no_other_hook() -> None:
    """Nothing is noted of the inputs for an action whose code reads other things of its event."""
    model, seen = nn.Sequential(nn.Linear(2, 2)), []
    with kedge.hook(model, "0", lambda value, event: seen.append(event.site)):
        assert not model[0]._forward_pre_hooks
        model(torch.ones(2))
