"""Limits with `recompute`: the plan runs again as few calls as the limit allows, and bits stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.offload.engine.policy import Choice
from kedge.offload.outcomes import OffloadAccount
from kedge.offload.plan import OffloadPlan, learn
from tests.offload.recompute.programs import Residual, assert_same, run, x_of

ROWS = 2048
STEPS = 12


def plan_of(account: OffloadAccount) -> OffloadPlan:
    """Return the plan that is in force."""
    assert isinstance(account.plan, OffloadPlan)
    return account.plan


class Stack(nn.Module):
    """Blocks that save much, one after another."""

    def __init__(self, number: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        """Call each block."""
        for block in self.blocks:
            x = block(x)
        return x


def step(model: nn.Module) -> None:
    """Run forward and backward of a batch that saves some hundred kB in each block."""
    model(x_of(rows=ROWS)).square().mean().backward()


def offloaded(model: nn.Module, **options: Any) -> Any:
    """Offload a model whose blocks may be run again."""
    return kedge.offload(model, recompute="blocks.*", min_bytes=1024, **options)


def repeats_of_last_step(make: Any, steps: int = STEPS, **options: Any) -> tuple[int, Any]:
    """Run a program; returns how many calls the last step ran again, and the account."""
    bare, _ = run(make, step, steps=steps)
    repeats = []

    def counted(model: nn.Module) -> None:
        before = account.total.repeats
        step(model)
        repeats.append(account.total.repeats - before)

    torch.manual_seed(0)
    model = make()
    with offloaded(model, **options) as account:
        found, _ = run(lambda: model, counted, steps=steps)
    assert len(found) == len(bare)
    return repeats[-1], account


def saved_by(make: Any) -> int:
    """Return the bytes that a step saves, without parameters."""
    model = make()
    with kedge.offload(model, to=kedge.Rebuild(), min_bytes=1024, max_memory=1 << 40) as account:
        for _ in range(3):
            step(model)
    return plan_of(account).table.nbytes


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_a_limit_runs_again_some_calls_and_not_all(share: float) -> None:
    """Fewer calls the more memory there is; the plan stays within its limit."""
    limit = int(saved_by(Stack) * share)
    repeats, account = repeats_of_last_step(Stack, max_memory=limit)

    plan = plan_of(account)
    assert plan.peak <= limit
    assert plan.is_known
    assert repeats == 6 - len(plan.once)
    assert 0 <= repeats < 6


def test_enough_memory_runs_nothing_again() -> None:
    """After the steps of learning, nothing costs any time."""
    repeats, account = repeats_of_last_step(Stack, max_memory="1 GB")

    assert repeats == 0
    assert plan_of(account).bytes_of(Choice.KEEP)[1] == plan_of(account).table.nbytes


def test_what_cannot_be_reached_runs_all_again() -> None:
    """The least possible is what all second runs leave."""
    with pytest.warns(kedge.errors.LimitOutOfReach, match="out of reach"):
        repeats, account = repeats_of_last_step(Stack, max_memory=0)

    assert repeats == 6
    assert "recompute" in str(account.plan)


def test_bits_stay_the_same_under_every_plan() -> None:
    """Gradients, state and random numbers are those of the bare program in each step."""
    bare, _ = run(Stack, step, steps=STEPS)
    whole = saved_by(Stack)
    for options in (
        {"max_memory": whole // 2},
        {"max_memory": whole // 4, "to": kedge.Disk()},
        {"max_slowdown": 3.0},
    ):
        found, _ = run(
            Stack,
            step,
            steps=STEPS,
            around=lambda model, options=options: offloaded(model, **options),
        )
        assert_same(bare, found)


class Repeated(nn.Module):
    """One block that is called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual()])

    def forward(self, x: Tensor) -> Tensor:
        """Call the block five times."""
        for _ in range(5):
            x = self.blocks[0](x)
        return x


def test_calls_of_one_module_are_planned_one_by_one() -> None:
    """Its tensors have the same keys whichever of its calls are run again, so the plan lasts."""
    limit = int(saved_by(Repeated) * 0.5)
    repeats, account = repeats_of_last_step(Repeated, steps=20, max_memory=limit)

    assert 0 < repeats < 5
    assert plan_of(account).peak <= limit


class Checkpointed(Stack):
    """Blocks of which the program has put two in a checkpoint of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Call the first two blocks in a checkpoint."""

        def first(x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x))

        x = checkpoint(first, x, use_reentrant=False)
        for block in self.blocks[2:]:
            x = block(x)
        return x


def test_blocks_in_a_checkpoint_of_the_program_are_not_planned() -> None:
    """Its second run finds in them what its first run did."""
    bare, _ = run(Checkpointed, step, steps=STEPS)
    found, account = run(
        Checkpointed, step, steps=STEPS, around=lambda model: offloaded(model, max_memory="1 GB")
    )
    assert_same(bare, found)
    assert {key.path for key in plan_of(account).once} == {f"blocks.{i}" for i in range(2, 6)}


def test_a_call_that_raises_and_other_sizes() -> None:
    """After an error in a block, and with batches of another length, steps go on as before."""

    def failing(model: nn.Module) -> None:
        handle = model.blocks[3].register_forward_pre_hook(_raise)  # type: ignore[index,union-attr]
        with pytest.raises(ZeroDivisionError):
            step(model)
        handle.remove()
        step(model)
        model(x_of(rows=ROWS // 2)).square().mean().backward()

    bare, _ = run(Stack, failing, steps=6)
    limit = int(saved_by(Stack) * 0.6)
    found, _ = run(Stack, failing, steps=6, around=lambda model: offloaded(model, max_memory=limit))
    assert_same(bare, found)


def _raise(*_: Any) -> None:
    raise ZeroDivisionError


class Leafy(Stack):
    """Blocks with work of their own, whose layers are what may be run again."""

    def forward(self, x: Tensor) -> Tensor:
        """Save a tensor outside of the layers, too."""
        for block in self.blocks:
            x = block(x).sigmoid()
        return x


def test_steps_that_keep_everything_do_not_end_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tensors are saved in them than the plan knows, since nothing is run again."""
    monkeypatch.setattr(learn, "has_room", lambda *_: True)
    model = Leafy(2)
    places = "blocks.*.**"
    with kedge.offload(model, recompute=places, min_bytes=1024, max_slowdown=100.0) as account:
        for _ in range(30):
            step(model)
    assert plan_of(account).repeats
    assert plan_of(account).measured is not None
