"""What `recompute` refuses: modules that are not in backward what they were in the forward, and requests that make no sense."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import NoSiteMatched, OffloadError, RecomputedWrong
from kedge.torch_internals import corners
from tests.offload.recompute.programs import SIZE, Residual, assert_same, blocks, check, run, x_of

Change = Callable[[Any], Any]


def stepped(model: Any) -> None:
    """Make a step of an optimizer."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def table_changed(model: Any) -> None:
    """Change a buffer that the forward only reads."""
    model[1].table.mul_(2)


def given_other_memory(model: Any) -> None:
    """Replace the memory of a parameter, which does not count as a change."""
    model[1].up.weight.data = model[1].up.weight.data * 2


def hooks_replaced(model: Any) -> None:
    """Clear a table of hooks, Kedge's among them, and add one."""
    model[1].up._forward_hooks.clear()
    model[1].up.register_forward_hook(lambda _m, _a, out: out * 2)


class Tabled(Residual):
    """Reads a buffer, which it does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        """Add it."""
        return super().forward(x + self.table)


class Doubled(Tabled):
    """The same module with another forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Give another output."""
        return super().forward(x * 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (stepped, 'parameter "norm.weight" of this module was changed'),
        (table_changed, 'buffer "table" of this module was changed'),
        (given_other_memory, 'parameter "up.weight"'),
        (lambda model: model.eval(), '"1" was in training mode'),
        (lambda model: model[1].drop.eval(), '"1.drop" was in training mode'),
        (lambda model: model[1].add_module("more", nn.ReLU()), "the modules inside were others"),
        (
            lambda model: model[1].up.register_forward_hook(lambda _m, _a, out: out * 2),
            '"1.up" had other forward hooks',
        ),
        (hooks_replaced, '"1.up" had other forward hooks'),
        (lambda model: setattr(model[1], "__class__", Doubled), '"1" was of another class'),
        (lambda model: model[1].up.weight.requires_grad_(False), "saved other tensors"),
    ],
)
def test_changes_between_forward_and_backward(change: Change, words: str) -> None:
    """The error names the module and what changed."""
    model = nn.Sequential(nn.Linear(SIZE, SIZE), Tabled())
    with kedge.offload(model, recompute="1", min_bytes=0):
        loss = model(x_of()).sum()
        change(model)
        with pytest.raises(RecomputedWrong, match='recompute="1"') as caught:
            loss.backward()
    assert words in str(caught.value)


def test_a_replaced_parameter_is_the_former_one_in_the_second_run() -> None:
    """As it is for the bare program, whose graph holds the former one."""

    def step(model: Any) -> None:
        loss = model(x_of()).square().sum()
        former = model[1].up.weight
        model[1].up.weight = nn.Parameter(torch.zeros_like(former))
        loss.backward()
        model[1].up.weight = former

    check(blocks, "[0-2]", step)


def test_functional_call() -> None:
    """The second run has the parameters of the call."""

    def step(model: Any) -> None:
        given = {name: (param * 2) for name, param in model.named_parameters()}
        torch.func.functional_call(model, given, (x_of(),)).square().sum().backward()

    check(blocks, "[0-2]", step)


class Around(nn.Module):
    """Calls a block, and changes its input later."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(SIZE, SIZE), block

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's output in place."""
        h = self.first(x) * 1.0
        h += torch.tanh(self.block(h))
        return h


class InPlace(nn.Module):
    """Begins with a ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """Change x."""
        y: Tensor = self.fc(torch.relu_(x))
        return y


@pytest.mark.parametrize("block", [InPlace, lambda: nn.Sequential(nn.LeakyReLU(0.1))])
def test_inputs_changed_in_place(block: Callable[[], nn.Module]) -> None:
    """They have their values if they were moved; otherwise the error names the input."""

    class Own(Around):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x) * 1.0
            y: Tensor = torch.tanh(self.block(h))
            h.mul_(2)
            return y

    make = lambda: Own(block())
    model = make()
    with kedge.offload(model, recompute="block", min_bytes=0):
        loss = model(x_of()).sum()
        with pytest.raises(RecomputedWrong, match='the input "0" of this .* was changed in place'):
            loss.backward()
    if block is InPlace:
        bare, _ = run(lambda: nn.Sequential(nn.Linear(SIZE, SIZE), InPlace()))
        found, _ = run(
            lambda: nn.Sequential(nn.Linear(SIZE, SIZE), InPlace()),
            around=lambda model: kedge.offload(
                model, recompute="1", to=kedge.Disk(rebuild=False), min_bytes=0
            ),
        )
        assert_same(bare, found)


class Overwrites(nn.Module):
    """Changes a tensor in place that its own backward needs."""

    def __init__(self, *, read: bool) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        """Add to the output of a ReLU; without `read` nothing depends on that ReLU."""
        y = torch.relu(x)
        y.detach().add_(1)
        if self.read:
            x = y
        return torch.sin(x)


def test_a_tensor_that_the_call_changes_after_it_was_saved() -> None:
    """Autograd refuses it in the bare program; what no backward reads may change in both."""
    model = nn.Sequential(nn.Linear(SIZE, SIZE), Overwrites(read=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x_of()).sum().backward()
    with kedge.offload(model, recompute="1", min_bytes=0):
        for _ in range(3):
            with pytest.raises(RecomputedWrong, match='"1": the call of this Overwrites saves'):
                model(x_of()).sum().backward()

    check(lambda: nn.Sequential(nn.Linear(SIZE, SIZE), Overwrites(read=False)), "1")


class Unsteady(nn.Module):
    """Depends on something outside of it."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """Scale x, and change the scale."""
        Unsteady.scale += 1
        y: Tensor = self.fc(x) * Unsteady.scale
        return y.exp().tanh()


class Deep(nn.Module):
    """Runs as many operations as something outside says."""

    depth = 2

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sine of the sine."""
        y: Tensor = self.fc(x)
        for _ in range(Deep.depth):
            y = y.sin()
        return y


def test_another_output() -> None:
    """The output of the second run is compared in the first forwards, before any gradient of it."""
    model = nn.Sequential(Unsteady())
    with kedge.offload(model, recompute="0", min_bytes=0):
        for _ in range(2):
            loss = model(x_of()).sum()
            with pytest.raises(RecomputedWrong, match='recompute="0": this Unsteady gave another'):
                loss.backward()
            assert model[0].fc.weight.grad is None


def test_later_outputs_are_compared_now_and_then() -> None:
    """A module that becomes unsteady later is found, too."""

    class Later(nn.Module):
        steps = 0

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor) -> Tensor:
            Later.steps += 1
            y: Tensor = self.fc(x).tanh() * (1.0 if Later.steps < 40 else Later.steps)
            return y

    model = nn.Sequential(Later())

    def train() -> None:
        for _ in range(130):
            model(x_of()).sum().backward()

    with (
        kedge.offload(model, recompute="0", min_bytes=0),
        pytest.raises(RecomputedWrong, match="gave another output"),
    ):
        train()


@pytest.mark.parametrize("forwards", [1, 5])
def test_other_tensors(forwards: int) -> None:
    """PyTorch's check of what is recomputed has the name of the module, whichever step it is in."""
    model = nn.Sequential(Residual(), Deep())
    with kedge.offload(model, recompute="1", min_bytes=0):
        for _ in range(forwards):
            model(x_of()).sum().backward()
        loss = model(x_of()).sum()
        Deep.depth = 1
        with pytest.raises(RecomputedWrong, match='recompute="1": this Deep'):
            loss.backward()
    Deep.depth = 2


def test_a_parameter_that_the_call_changes() -> None:
    """It would be changed twice."""

    class Decays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.fc.weight.mul_(0.9)
            y: Tensor = self.fc(x)
            return y

    model = nn.Sequential(Decays())
    with (
        kedge.offload(model, recompute="0"),
        pytest.raises(RecomputedWrong, match='changed its parameter "fc.weight" in place'),
    ):
        model(x_of())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_buffer_that_begins_to_change_later() -> None:
    """Its former values are not known, unless the mode is another one."""

    class Late(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            if random.random() < self.chance:
                self.count.add_(1)
            return super().forward(x)

    Late.chance = 0  # type: ignore[attr-defined]
    model = nn.Sequential(Late())
    with kedge.offload(model, recompute="0"):
        for _ in range(3):
            model(x_of()).sum().backward()
        Late.chance = 1  # type: ignore[attr-defined]
        loss = model(x_of()).sum()
        with pytest.raises(RecomputedWrong, match='the call changed "count" in place'):
            loss.backward()
        for _ in range(2):
            model(x_of()).sum().backward()
    assert model[0].count.tolist() == [3, 3, 3]


def lazy() -> nn.Module:
    """Return a model without values yet."""
    return nn.Sequential(nn.LazyLinear(SIZE))


def compiled() -> nn.Module:
    """Return a compiled model, which is never called."""
    return torch.compile(blocks())  # type: ignore[return-value]


def compiled_inside() -> nn.Module:
    """Return a model with a compiled module."""
    model: Any = blocks()
    model[0] = torch.compile(model[0])
    model[1].compile()
    return model  # type: ignore[no-any-return]


def scripted() -> nn.Module:
    """Return a model with a scripted module."""
    model: Any = blocks()
    model[0] = torch.jit.trace(nn.Linear(SIZE, SIZE), x_of())
    model[1] = torch.jit.script(nn.Linear(SIZE, SIZE))
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (blocks, {"recompute": 3}, "recompute=3: use a selector"),
        (blocks, {"recompute": "0:in"}, "runs whole modules again"),
        (blocks, {"recompute": "0/gelu"}, "runs whole modules again"),
        (blocks, {"recompute": "0", "codec": "int8"}, "the codec rounds the inputs"),
        (lazy, {"recompute": "0"}, "have no values yet"),
        (compiled, {"recompute": "0"}, "it is compiled"),
        (compiled_inside, {"recompute": "0._orig_mod"}, "it is compiled"),
        (compiled_inside, {"recompute": "1.up"}, "it is compiled"),
        (scripted, {"recompute": "1"}, "TorchScript"),
        (lambda: nn.DataParallel(blocks()), {"recompute": "**"}, "name modules inside of it"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_refused_requests(make: Any, options: dict[str, Any], words: str) -> None:
    """The message names the request, the cause and the remedy."""
    with pytest.raises(OffloadError) as caught:
        kedge.offload(make(), **options)
    assert words in str(caught.value)


def test_nothing_selected_and_no_model() -> None:
    """As for `where`."""
    with pytest.raises(NoSiteMatched, match="the nearest paths"):
        kedge.offload(blocks(), recompute="block.*")
    with pytest.raises(OffloadError, match="without a model"):
        kedge.offload(recompute="block.*")  # type: ignore[call-overload]


def test_without_the_private_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another PyTorch may not have it."""
    monkeypatch.setattr("kedge.torch_internals.checkpoint.find", lambda _: None)
    with pytest.raises(OffloadError, match="_checkpoint_without_reentrant_generator"):
        kedge.offload(blocks(), recompute="0")
    assert corners.find("torch.utils.checkpoint:_checkpoint_without_reentrant_generator")
