"""On real architectures: observing changes no bit and leaves nothing behind."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.optim import optimizer as optimizer_hooks

pytest.importorskip("transformers")
import kedge
from kedge.repro.step import step_again
from kedge.repro.step.copied_process import CopiedProcess
from kedge.watch.records.loss_jumps import LossJumps
from tests.architectures.training import EVERYTHING, plain, train, unlike
from tests.architectures.zoo import BY_NAME, SAMPLE, Architecture, architectures
from tests.marks import sampled

OBSERVERS: dict[str, Callable[[], Any]] = {
    "record": kedge.record,
    "function": lambda: lambda value: None,
    "measure": kedge.measure,
}
pytestmark = pytest.mark.filterwarnings("ignore::kedge.errors.NeverFiredWarning")


def observed(
    architecture: Architecture, model: nn.Module, action: Any, sites: str = EVERYTHING
) -> dict[str, Tensor]:
    """Train with an action at the sites."""
    with kedge.session() as s:
        s.hook(model, sites, action)
        return train(architecture, model)


def tables(model: nn.Module) -> dict[str, Any]:
    """Everything that hooks could leave: on modules, on parameters, and in the process."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name} attributes"] = list(vars(module))
        for attribute, value in vars(module).items():
            if "hook" in attribute and isinstance(value, dict):
                found[f"{name}.{attribute}"] = (
                    id(value),
                    list(value),
                    [id(hook) for hook in value.values()],
                )
    for name, param in [*model.named_parameters(), *model.named_buffers()]:
        found[f"{name} attributes"] = list(vars(param))
        for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            found[f"{name}.{attribute}"] = list(
                (getattr(param, attribute) or {}).values()
            )  # an empty table is none
    for place in (global_hooks, optimizer_hooks):
        for attribute, value in vars(place).items():
            if attribute.startswith("_global") and isinstance(value, dict):
                found[attribute] = list(value.items())
    return found


@pytest.mark.parametrize("observer", OBSERVERS)
@architectures
def test_observing_a_training_changes_no_bit(architecture: Architecture, observer: str) -> None:
    """Outputs, loss, gradients, generators and weights of two steps are those of a model nobody watches."""
    bare = plain(architecture)
    watched = observed(architecture, architecture.build(), OBSERVERS[observer]())
    assert unlike(bare, watched) == []


@pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux")
@architectures
def test_a_step_that_runs_again_in_a_copy_changes_no_bit(
    architecture: Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is forked in the middle of both backward passes, as if each loss had jumped."""
    monkeypatch.setattr(LossJumps, "add", lambda self, loss: True)
    monkeypatch.setattr("kedge.watch.records.steps_again._PATIENCE", 100.0)
    copies: list[int] = []
    ended: list[bytes | None] = []

    class Counted(CopiedProcess):
        def __init__(self, work: Callable[[], bytes]) -> None:
            super().__init__(work)
            copies.append(self._pid)

        def result(self, seconds: float = 0.0) -> bytes | None:
            found = super().result(seconds)
            ended.append(found)
            return found

    monkeypatch.setattr(step_again, "CopiedProcess", Counted)
    bare = plain(architecture)
    with kedge.watch(tmp_path / "run.kedge"):
        watched = train(architecture, architecture.build())

    assert len(copies) == 2
    assert ended[-1] is not None
    assert unlike(bare, watched) == []


def test_the_comparison_sees_one_changed_bit() -> None:
    """An edit of one gradient by one unit in the last place is found, so that equality above means something."""
    architecture = BY_NAME["bert"]
    bare = plain(architecture)
    site = "bert.encoder.layer.1.output.dense.bias:param.grad"
    nudged = observed(
        architecture, architecture.build(), lambda g: torch.nextafter(g, torch.ones_like(g)), site
    )
    different = unlike(bare, nudged)
    assert "0.grad.bert.encoder.layer.1.output.dense.bias" in different
    assert "0.grad.bert.encoder.layer.0.output.dense.bias" not in different


def test_the_comparison_sees_one_drawn_number() -> None:
    """An action that draws from the generator is found, so that equality of generators means something."""
    architecture = BY_NAME["bert"]
    bare = plain(architecture)
    drawn = observed(
        architecture, architecture.build(), lambda value: torch.rand(1) and None, "cls:out"
    )
    assert "rng.torch" in unlike(bare, drawn)


@pytest.mark.parametrize(
    "name", sampled(["bert", "llama", "t5", "swin", "mixtral", "resnet"], SAMPLE)
)
def test_observing_the_share_of_each_call_changes_no_bit(name: str) -> None:
    """Following what every call sends back to each input leaves the training as it is."""
    architecture = BY_NAME[name]
    bare = plain(architecture)
    watched = observed(
        architecture,
        architecture.build(),
        kedge.record(),
        f"{EVERYTHING}, **:in, **:param, **:in.share",
    )
    assert unlike(bare, watched) == []


@pytest.mark.parametrize("observer", OBSERVERS)
@architectures
def test_a_session_leaves_the_hook_tables_as_they_were(
    architecture: Architecture, observer: str
) -> None:
    """After a training step under observation every table and attribute is what it was, the user's hook among them."""
    model = architecture.build()
    train(
        architecture, model, steps=1
    )  # some models set attributes and hooks of their own in their first forward
    fired = []
    handle = model.register_forward_hook(lambda *_: fired.append(1))
    before = tables(model)
    with kedge.session() as s:
        s.hook(model, f"{EVERYTHING}, **:in.share", OBSERVERS[observer]())
        assert tables(model) != before
        train(architecture, model, steps=1)
    after = tables(model)
    assert {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)} == set()
    assert fired == [1]
    handle.remove()


@pytest.mark.parametrize("ran", [False, True], ids=["new", "trained"])
@architectures
def test_copies_of_a_hooked_model_are_those_of_an_unhooked_one(
    architecture: Architecture, ran: bool
) -> None:
    """Pickle writes the same bytes and deepcopy makes the same model whether or not hooks are on it."""
    model = architecture.build()
    with kedge.session() as s:
        h = s.hook(model, EVERYTHING, kedge.record())
        if ran:
            train(architecture, model, steps=1)
        pickled, copies = pickle_of(model), [copy.deepcopy(model)]
        copies += [pickle.loads(pickled)] if isinstance(pickled, bytes) else []
        fired = len(s.timeline())
        trained = [train(architecture, twin, steps=1) for twin in copies]
        assert len(s.timeline()) == fired, "a copy of a hooked model fired its hooks"
        h.remove()
    assert pickle_of(model) == pickled
    plain = copy.deepcopy(model)
    expected = train(architecture, plain, steps=1)
    assert [unlike(expected, got) for got in trained] == [[]] * len(copies)
    assert [furniture(twin) == furniture(plain) for twin in copies] == [True] * len(copies)


def pickle_of(model: nn.Module) -> bytes | str:
    """The pickled model, or why PyTorch does not pickle it (parametrized, or with local functions as hooks)."""
    try:
        return pickle.dumps(model)
    except (RuntimeError, AttributeError) as refused:
        return str(refused)


def furniture(model: nn.Module) -> list[Any]:
    """What every module holds: its attributes, and how many hooks are in which table."""
    return [
        (name, [(k, len(v) if isinstance(v, dict) else None) for k, v in vars(m).items()])
        for name, m in model.named_modules()
    ]
