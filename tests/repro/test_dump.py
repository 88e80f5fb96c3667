"""``--dump``: the call that made the first NaN, kept so that it can be run again alone."""

from __future__ import annotations

import copy
import functools
import gc
import io
import json
import math
import pickle
import runpy
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from kedge.repro.first_bad_call import FirstBadCall
from kedge.store.events import RunEvent
from kedge.testing import assert_same_bits, assert_unhooked
from tests import forked

NAN = math.nan


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)


class Sqrt(nn.Module):
    """Its derivative at 0 is infinite, its value there is not."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x)


class Net(nn.Module):
    """Two layers, something that may go wrong, and a head."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.fc, self.act, self.middle, self.head = (
            nn.Linear(4, 8),
            nn.Flatten(),
            middle,
            nn.Linear(8, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.act(self.fc(x))))


class Glue(nn.Module):
    """What goes wrong is an operation in its own forward."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.head, self.operation = nn.Linear(4, 8), nn.Linear(8, 1), operation

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.operation(self.fc(x)))


def safe_sqrt(x: Tensor) -> Tensor:
    """A square root that is only safe in the forward."""
    return torch.where(x > 0, torch.sqrt(x), x)


class Told(NamedTuple):
    """A recording's folder, and the messages to its log."""

    folder: Path
    events: list[Mapping[str, Any]]

    def event(self, event: RunEvent) -> None:
        self.events.append(event.entry())

    def place(self) -> Path | None:
        return self.folder if (self.folder / "manifest.json").exists() else None

    @property
    def dumps(self) -> list[Path]:
        return sorted(self.folder.glob("dump-*"))

    @property
    def notes(self) -> list[str]:
        return [e["text"] for e in self.events if e["kind"] == "note"]


@pytest.fixture
def log(tmp_path: Path) -> Told:
    """A recording's folder that is there."""
    folder = tmp_path / "run.kedge"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    return Told(folder, [])


def train(
    model: nn.Module,
    log: Told,
    batches: list[Any],
    *,
    loss: Callable[[Any], Tensor] = lambda out: out.square().mean(),
    step: Callable[[torch.optim.Optimizer], None] = lambda o: o.step(),
    begun: bool = False,
    limit: int = 1 << 30,
) -> FirstBadCall:
    """Train with a dump watching, as a watch would have it do."""
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.0)
    ended: list[int] = []
    optimizer.register_step_post_hook(lambda *_: ended.append(len(ended)))
    dump = FirstBadCall(log.place, log, lambda: len(ended), limit=limit)
    if not begun:
        dump.watch(model, lambda path: path)
    for number, batch in enumerate(batches):
        if begun and not number:
            begin(dump, model)
        optimizer.zero_grad()
        out = model(**batch) if isinstance(batch, dict) else model(batch)
        value = loss(out)
        if value.requires_grad:
            value.backward()
        step(optimizer)
        if ended:
            dump.step_ended(suspicious=True)
    dump.close()
    return dump


def begin(dump: FirstBadCall, model: nn.Module) -> None:
    """Start a dump on a model whose first call has begun."""

    def entered(module: nn.Module, args: Any) -> None:
        if module is model:
            handle.remove()
            dump.watch(model, lambda path: path, begun=True)

    handle = nn.modules.module.register_module_forward_pre_hook(entered)


def replay(folder: Path, code: int = 0) -> str:
    """Run a dump's script alone, in another process and folder."""
    ended = forked.run([sys.executable, "replay.py"], cwd=folder)
    assert (ended.returncode, ended.stderr) == (code, ""), ended.stdout + ended.stderr
    return ended.stdout


def replay_without_kedge(folder: Path) -> str:
    """Run a dump's script in a Python that cannot import Kedge."""
    code = "import runpy, sys; sys.modules['kedge'] = None; runpy.run_path('replay.py', run_name='__main__')"
    ended = forked.run([sys.executable, "-c", code], cwd=folder)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout + ended.stderr
    return ended.stdout


def replay_here(folder: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """Run a dump's script in this process, which takes less time."""
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["replay.py"])
        runpy.run_path(str(folder / "replay.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert ended.value.code == code, out
    return out


def positive(n: int = 5) -> Tensor:
    """A batch that `Net` with fc = 1 keeps positive."""
    return torch.rand(n, 4) + 0.5


def net(middle: nn.Module, cls: type = Net) -> Any:
    """A net whose first layer copies its inputs, twice."""
    model = cls(middle)
    with torch.no_grad():
        model.fc.weight.copy_(torch.eye(4).repeat(2, 1))
        model.fc.bias.zero_()
    return model


def zeroed(batch: Tensor) -> Tensor:
    """A batch one of whose values is zero."""
    batch = batch.clone()
    batch[1, 2] = 0
    return batch


def test_the_call_that_made_it_is_kept_with_all_it_needs(log: Told) -> None:
    """The first call whose inputs and parameters were finite and whose output was not is saved as it was, to the bit."""
    bad = zeroed(positive())
    train(net(Log()), log, [positive(), bad, bad])

    (folder,) = log.dumps
    assert folder.name == "dump-1"
    told = {
        "site": "middle:out",
        "module": "middle",
        "value": "inf",
        "direction": "forward",
        "reached": True,
    }
    assert log.events == [{"kind": "dump", "step": 1, "folder": "dump-1", **told}]
    saved = load_file(folder / "tensors.safetensors")
    assert_same_bits(saved["args.0"], bad.repeat(1, 2))
    assert "random.cpu" in saved
    with safe_open(folder / "tensors.safetensors", "pt") as file:
        told = {"site": "middle:out", "step": "1", "notes": "[]"}
        assert file.metadata() == {**told, "seen": '{"nan": 0, "inf": 2, "elements": 40}'}


def test_the_script_names_the_operation_and_its_line(log: Told) -> None:
    """Run alone, it finds the same elements, the operation and the line of the module's own code."""
    train(net(Log()), log, [zeroed(positive())])

    told = replay(log.dumps[0])

    assert told.splitlines()[0] == "middle at step 0, forward, on cpu"
    assert "an infinity in the forward: log: 2 of 40 elements, from float32[5, 8] in [0, " in told
    assert f"{__file__}:" in told
    assert "return torch.log(x)" in told


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "linear": (lambda: nn.Linear(4, 3), lambda: torch.full((2, 4), 3e38)),
    "linear float16": (
        lambda: nn.Linear(4, 3).half(),
        lambda: torch.full((2, 4), 6e4, dtype=torch.float16),
    ),
    "linear bfloat16": (
        lambda: nn.Linear(4, 3).bfloat16(),
        lambda: torch.full((2, 4), 3e38, dtype=torch.bfloat16),
    ),
    "conv": (
        lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"),
        lambda: torch.full((2, 1, 5, 5), 3e38),
    ),
    "layer norm": (lambda: nn.LayerNorm(4, eps=0.0), lambda: torch.ones(2, 4)),
    "batch norm": (
        lambda: nn.BatchNorm1d(4),
        lambda: torch.full((3, 4), 3e38) * torch.tensor([[1.0], [-1], [1]]),
    ),
    "rnn": (
        lambda: nn.RNN(4, 3, num_layers=2, nonlinearity="relu"),
        lambda: torch.full((2, 1, 4), 3e38),
    ),
    "attention": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        lambda: torch.full((1, 2, 4), 3e38),
    ),
    "sequential": (lambda: nn.Sequential(nn.Linear(4, 4), Log()), lambda: torch.zeros(1, 4) - 9),
    "embedding and more": (lambda: Picks(), lambda: torch.tensor([[0, 1], [1, 1]])),
}


class Picks(nn.Module):
    """Attributes of many kinds: what forward needs of them is made again without a constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 4, padding_idx=0)
        self.tied = self.table
        self.options = {
            "rate": 0.5,
            "shape": torch.Size([4]),
            "how": F.relu,
            "limits": (NAN, -math.inf),
            "dtype": torch.float32,
        }
        self.shift = torch.arange(4.0)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)
        self.nothing = None
        self.type = nn.Identity()  # the name of a method of modules, which an assignment may hide
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.register_parameter("bias", None)

    def forward(self, indices: Tensor) -> Tensor:
        x = self.options["how"](self.tied(indices)) * self.scale + self.shift
        assert self.bias is None
        assert self.nothing is None
        return (x.to(self.options["dtype"]) - 1 * self.mask).log() * self.options["rate"]


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_made_again_without_a_pickle(name: str, log: Told, capsys) -> None:
    """A module of any class that can be imported is what it was: attributes, parameters, buffers, children."""
    torch.manual_seed(1)
    make, batch = MODULES[name]
    train(
        make(),
        log,
        [batch()],
        loss=lambda out: (out[0] if isinstance(out, tuple) else out).float().sum(),
    )

    told = replay_here(log.dumps[0], capsys)

    assert "an infinity" in told or "the first NaN" in told
    assert "missing(" not in (log.dumps[0] / "replay.py").read_text().split("# -- the tensors")[0]


def filled(module: nn.Module, value: float = 1.0) -> nn.Module:
    """A module all of whose parameters are a number."""
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(value)
    return module


def shared() -> nn.Module:
    """A model that calls one of its layers twice, before another."""
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, layer, nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))


ALONE: dict[str, tuple[Callable[[], nn.Module], Tensor, float]] = {
    "rnn": (
        lambda: filled(nn.RNN(4, 3, num_layers=2, nonlinearity="relu")),
        torch.full((2, 1, 4), 3e38),
        1,
    ),
    "mlp": (
        lambda: filled(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))),
        torch.full((2, 4), 3e38),
        1,
    ),
    "attention": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        torch.full((1, 2, 4), 3e38),
        1,
    ),
    "shared": (lambda: filled(shared()), torch.eye(4) * 3e38, 1),
    "lstm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 3, num_layers=2)),
        torch.ones(64, 4),
        3e38,
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_the_script_runs_without_kedge(name: str, log: Told) -> None:
    """The folder of a dump can be handed to somebody who does not have Kedge."""
    torch.manual_seed(1)
    make, batch, scale = ALONE[name]
    train(
        make(),
        log,
        [batch],
        loss=lambda out: (out[0] if isinstance(out, tuple) else out).sum() * scale,
    )

    text = replay_without_kedge(log.dumps[0])

    assert f"in the {log.events[0]['direction']}: " in text
    assert ("backward" if name == "lstm" else "forward") == log.events[0]["direction"]


def test_an_operation_between_two_modules_is_their_containers(log: Told, capsys) -> None:
    """Where no child made it, the module is kept whose forward holds the operation."""
    train(net(torch.log, Glue), log, [positive(), zeroed(positive())])

    assert log.events[0]["site"] == "head:in"
    assert "log: 2 of 40 elements" in replay_here(log.dumps[0], capsys)


def test_a_birth_in_the_backward_is_kept_with_the_gradient_that_came_in(log: Told) -> None:
    """Inputs, parameters and the output's gradient were finite: the script runs the backward, and names its operation."""
    train(net(Sqrt()), log, [positive(), zeroed(positive())])

    told = {
        "site": "middle:in.grad",
        "module": "middle",
        "value": "inf",
        "direction": "backward",
        "reached": True,
    }
    assert log.events == [{"kind": "dump", "step": 1, "folder": "dump-1", **told}]
    told = replay(log.dumps[0])
    assert told.splitlines()[0] == "middle at step 1, backward, on cpu"
    assert "an infinity in the backward: div: " in told
    assert "in SqrtBackward0, the backward of" in told
    assert "return torch.sqrt(x)" in told


def test_a_birth_in_the_backward_of_an_operation_between_modules(log: Told, capsys) -> None:
    """Gradients that no child's backward made are those of the container, whose own output's gradient was finite."""
    train(net(safe_sqrt, Glue), log, [positive(), zeroed(positive())])

    assert (log.events[0]["site"], log.events[0]["module"]) == ("fc:out.grad", "")
    assert "in SqrtBackward0" in replay_here(log.dumps[0], capsys)


class Beside(nn.Module):
    """An operation of its own takes what a child takes too; either may be the one whose derivative is infinite."""

    def __init__(self, child: nn.Module, *, own: bool) -> None:
        super().__init__()
        self.a, self.b, self.own = nn.Linear(4, 3), child, own

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) + ((h - h).square().sum(-1, keepdim=True).sqrt() if self.own else h.tanh())


class Distance(nn.Module):
    """Its derivative is infinite everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x).square().sum(-1, keepdim=True).sqrt()


def wrapped() -> nn.Module:
    """A child that hands what it is given to one inside, and takes none of it itself."""
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


@pytest.mark.parametrize(
    "child", [lambda: nn.Linear(3, 3), wrapped, lambda: nn.ReLU(inplace=False), nn.Identity]
)
def test_an_operation_beside_a_child_is_its_containers(
    child: Callable[[], nn.Module], log: Told, capsys
) -> None:
    """What a child and an operation of the container's own take in both: only what each sends back tells who spoiled it."""
    train(nn.Sequential(Beside(child(), own=True)), log, [torch.randn(5, 4)])

    assert (log.events[0]["site"], log.events[0]["module"]) == ("0.a:out.grad", "0")
    assert "in SqrtBackward0" in replay_here(log.dumps[0], capsys)


def test_a_forward_that_raises_leaves_nothing_of_its_graph(log: Told) -> None:
    """Where a call lies in the graph is known only while it lasts, however it ends."""
    model = net(nn.Linear(3, 3))  # it is given 8
    dump = FirstBadCall(log.place, log, lambda: 0)
    dump.watch(model, lambda path: path)
    made: list[weakref.ref[Any]] = []
    handle = model.act.register_forward_hook(lambda m, i, out: made.append(weakref.ref(out)))
    with pytest.raises(RuntimeError, match="shapes"):
        model(positive())
    handle.remove()
    gc.collect()

    assert [ref() for ref in made] == [None]
    assert not dump._hooks._tracker.open.notes
    dump.close()


@pytest.mark.parametrize("inside", [False, True])
def test_a_child_beside_an_operation_is_kept_itself(inside: bool, log: Told, capsys) -> None:
    """The other way round it is the child's, and if that has children the innermost one's."""
    child = nn.Sequential(Distance()) if inside else Distance()
    train(nn.Sequential(Beside(child, own=False)), log, [torch.randn(5, 4)])

    assert log.events[0]["module"] == ("0.b.0" if inside else "0.b")
    assert log.events[0]["site"] == f"{log.events[0]['module']}:in.grad"
    assert "in SqrtBackward0" in replay_here(log.dumps[0], capsys)


def test_the_gradient_of_a_parameter_can_be_the_first(log: Told, capsys) -> None:
    """A weight's gradient that overflows is its module's, even where no gradient goes on."""
    model = nn.Linear(4, 3)
    train(model, log, [torch.full((2, 4), 1e30)], loss=lambda out: (out * 1e10).sum())

    assert log.events[0]["site"] == ":param.grad"
    assert "an infinity in the backward: mm: " in replay_here(log.dumps[0], capsys)


@dataclass
class Structure:
    """What a module may be given."""

    values: Tensor
    scale: float


class Takes(nn.Module):
    """Takes all sorts of arguments, by position and by name; gives a dict."""

    def forward(
        self, first: Tensor, pair: tuple[Tensor, int], *, inside: Structure, power: str
    ) -> dict[str, Tensor]:
        return {
            "all": (first + pair[0] * pair[1] + inside.values * inside.scale).log(),
            "power": first,
        }


def test_arguments_of_all_kinds_are_given_again(log: Told, capsys) -> None:
    """Tensors in structures, numbers, texts and dataclasses are what they were."""
    batch = {
        "first": torch.zeros(2, 3).T,
        "pair": (torch.ones(3, 2), 2),
        "power": "x",
        "inside": Structure(torch.ones(3, 2), -3.0),
    }
    train(Takes(), log, [batch], loss=lambda out: out["all"].sum())

    told = replay_here(log.dumps[0], capsys)

    assert (
        "the first NaN in the forward: log: 6 of 6 elements, from float32[3, 2] in [-1, -1]" in told
    )
    assert "tensor('kwargs.first', (1, 3))" in (log.dumps[0] / "replay.py").read_text()


def test_what_cannot_be_written_down_has_its_place(log: Told, capsys) -> None:
    """What is neither a value nor importable is named where it is to be filled in, and the script says so."""
    model = net(Log())
    model.middle.scale = lambda x: x
    train(model, log, [zeroed(positive())])

    assert "'scale': missing('function: <function" in (log.dumps[0] / "replay.py").read_text()
    assert "look for missing( in this file" in replay_here(log.dumps[0], capsys)


class Noisy(nn.Module):
    """Makes an infinity of what its dropout sets to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return 1 / self.dropout(x)


def test_random_numbers_are_drawn_again(log: Told, capsys) -> None:
    """The state of the random numbers is that before the call: the same elements go wrong."""
    counts = []
    model = nn.Sequential(nn.Linear(10, 10), Noisy())
    model[1].register_forward_hook(lambda m, i, o: counts.append(int(o.isinf().sum())))
    train(model, log, [torch.rand(40, 10) + 1])

    told = replay_here(log.dumps[0], capsys)

    assert f"reciprocal: {counts[0]} of 400 elements" in told


class Normed(nn.Module):
    """Goes wrong after a batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(x) - 1e9).log()


def test_buffers_are_saved_as_before_the_call(log: Told, capsys) -> None:
    """Batch normalization changes its buffers in the call; what is saved is what they were."""
    model = Normed()
    before = copy.deepcopy(model.state_dict())
    train(model, log, [torch.randn(6, 3) + 7])

    saved = load_file(log.dumps[0] / "tensors.safetensors")

    assert_same_bits({n: saved[f"buffer.{n}"] for n in before if "weight" not in n and "bias" not in n},
                     {n: v for n, v in before.items() if "weight" not in n and "bias" not in n})  # fmt: skip
    assert model.norm.running_mean.abs().sum() > 0
    assert "the first NaN in the forward: log" in replay_here(log.dumps[0], capsys)


class Inplace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul(1).log_() if not self.training else x.log_()


def test_an_input_that_was_overwritten_is_never_given_out_for_what_it_was(
    log: Told, capsys
) -> None:
    """A module that works in place overwrites its input: the first time that is said, from then on it is copied before."""
    model = nn.Sequential(nn.Linear(4, 4), Inplace())
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4)), model[0].bias.zero_()
    twin = copy.deepcopy(model)
    train(model, log, [positive(), zeroed(positive())])
    other = Told(log.folder.parent / "other.kedge", [])
    other.folder.mkdir()
    (other.folder / "manifest.json").write_text("{}")
    train(twin, other, [zeroed(positive())])

    assert "log_: 1 of 20 elements" in replay_here(log.dumps[0], capsys)
    (first,) = other.dumps
    assert "args.0" not in load_file(first / "tensors.safetensors")
    script = (first / "replay.py").read_text()
    assert "args.0 was changed in place after the call began: its original value is lost" in script
    assert "missing(" in script


def test_a_later_change_does_not_reach_a_suspect(log: Told) -> None:
    """What is suspected is copied at once: the program may overwrite the batch before it is decided."""
    bad = zeroed(positive())
    model = nn.Sequential(Log(), nn.Linear(4, 1))
    train(model, log, [bad], loss=lambda out: bad.fill_(7) is None or out.sum())

    assert_same_bits(
        load_file(log.dumps[0] / "tensors.safetensors")["args.0"][1, 2], torch.tensor(0.0)
    )


def test_the_parameters_are_those_before_the_update(log: Told) -> None:
    """The optimizer has not stepped yet when a dump is decided upon."""
    model = net(torch.log, Glue)
    before = copy.deepcopy(model.fc.weight.detach())

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 1.0
        optimizer.step()

    train(model, log, [zeroed(positive())], step=step)

    assert model.fc.weight.isnan().any()
    assert_same_bits(load_file(log.dumps[0] / "tensors.safetensors")["param.fc.weight"], before)


def test_a_skipped_step_of_loss_scaling_is_no_reason(log: Told) -> None:
    """A scaler makes infinite gradients and skips the step: that is how it works."""
    model, scaler = nn.Linear(4, 3), torch.amp.GradScaler("cpu", init_scale=2.0**24)

    def step(optimizer: torch.optim.Optimizer) -> None:
        scaler.step(optimizer)
        scaler.update()

    steps: list[float] = []

    def loss(out: Tensor) -> Tensor:
        steps.append(scaler.get_scale())
        return scaler.scale(out.float().sum())

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = model

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return self.fc(x)

    train(Half(), log, [torch.randn(2, 4) for _ in range(30)], loss=loss, step=step)

    assert steps[-1] < steps[0]
    assert log.dumps == []
    assert log.events == []


class Masked(nn.Module):
    """Attention's mask: -inf on purpose, which softmax makes zero of - unless a whole row is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.mask, self.softmax = nn.Linear(4, 4), Mask(), nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax(self.mask(self.scores(x), x))


class Mask(nn.Module):
    def forward(self, scores: Tensor, x: Tensor) -> Tensor:
        return scores.masked_fill(x == 0, -math.inf)


def test_masks_are_no_reason_until_they_make_a_nan(log: Told, capsys) -> None:
    """Infinities that were there in steps that went well are on purpose: the module that makes a NaN of them is kept."""
    usual, whole = zeroed(positive()), zeroed(positive())
    whole[3] = 0
    train(Masked(), log, [usual, usual, whole])

    assert (log.events[0]["site"], log.events[0]["step"]) == ("softmax:out", 2)
    assert "the first NaN in the forward: _softmax: 4 of 20 elements" in replay_here(
        log.dumps[0], capsys
    )


def test_what_cannot_be_a_birth_is_noted(log: Told) -> None:
    """A parameter that held a NaN before, or a batch that does, is no call's fault; nothing is kept, and that is said."""
    model = net(nn.Tanh())
    with torch.no_grad():
        model.head.weight[0, 0] = NAN
    train(model, log, [positive()])
    train(net(nn.Tanh()), log, [positive() * NAN])
    train(net(nn.Tanh()), log, [positive()], loss=lambda out: (out.sum() * 0).sqrt())

    assert log.dumps == []
    assert log.notes == [
        "no dump was written: head.weight was not finite before the call",
        "no dump was written: the value came from outside of the model, at :in",
        "no dump was written: the gradient that entered head was not finite",
    ]


def test_a_dump_has_a_limit(log: Told) -> None:
    """What takes more than the limit is not written, and the note says how much that is."""
    train(net(Log()), log, [zeroed(positive())], limit=100)

    assert log.dumps == []
    assert log.notes == [
        "no dump was written: the inputs and parameters of middle exceed the limit of 9.31e-08 GiB"
    ]


def test_only_the_first_is_kept_and_then_nothing_more_is_looked_at(log: Told) -> None:
    """One dump a run: from then on the program runs without these hooks."""
    model, seen = net(Log()), []
    model.middle.register_forward_hook(lambda m, i, o: seen.append(len(m._forward_hooks)))
    train(model, log, [zeroed(positive())] * 3)

    assert [d.name for d in log.dumps] == ["dump-0"]
    assert seen == [2, 1, 1]


def test_other_hooks_ahead_of_optimizers_run_all_the_same(log: Told) -> None:
    """What is found is found while PyTorch goes through these hooks: none of them may go at that time."""
    ran: list[int] = []
    hooks = [register_optimizer_step_pre_hook(lambda *_: ran.append(1))]
    model = net(Log())
    dump = FirstBadCall(log.place, log, lambda: 0)
    dump.watch(model, lambda path: path)
    hooks.append(register_optimizer_step_pre_hook(lambda *_: ran.append(2)))
    model(zeroed(positive())).sum().backward()
    torch.optim.SGD(model.parameters()).step()
    dump.step_ended(suspicious=True)
    dump.close()
    for hook in hooks:
        hook.remove()

    assert ran == [1, 2]
    assert [d.name for d in log.dumps] == ["dump-0"]


@pytest.mark.parametrize("bad", [False, True])
def test_the_hooks_go_with_the_end(bad: bool, log: Told) -> None:
    """Whether something was found or not, no hook stays."""
    model = net(Log())
    train(model, log, [zeroed(positive()) if bad else positive()])

    assert_unhooked(model)
    assert len(log.dumps) == bad


def test_it_waits_for_the_folder(log: Told, tmp_path: Path) -> None:
    """The recording begins with the end of the first step; what is found before is written then, or told at the end."""
    (log.folder / "manifest.json").unlink()
    model = net(Log())
    dump = FirstBadCall(log.place, log, lambda: 0)
    dump.watch(model, lambda path: path)
    model(zeroed(positive())).sum().backward()
    dump.step_ended(suspicious=True)
    assert log.dumps == []
    (log.folder / "manifest.json").write_text("{}")
    dump.step_ended(suspicious=False)
    assert [d.name for d in log.dumps] == ["dump-0"]
    dump.close()

    train(net(Log()), Told(tmp_path / "never.kedge", log.events), [zeroed(positive())])
    assert log.notes == ["no dump was written: there is no recording"]


@pytest.mark.parametrize("middle", [Log, Sqrt], ids=["forward", "backward"])
def test_sums_that_are_read_late_tell_the_same(
    middle: type[nn.Module], log: Told, monkeypatch
) -> None:
    """On a device where reading waits, many are read together: the order of the values, and so the verdict, is the same."""
    monkeypatch.setattr("kedge.repro.finiteness.AT_ONCE", frozenset())
    train(net(middle()), log, [positive(), zeroed(positive())])

    assert log.events[0]["step"] == 1
    assert log.events[0]["site"] == ("middle:out" if middle is Log else "middle:in.grad")
    assert "args.0" in load_file(log.dumps[0] / "tensors.safetensors")


def test_the_first_call_is_seen_from_its_end(log: Told, capsys) -> None:
    """A root is found when its first call has begun: what that was given is taken from where it ends."""
    train(net(torch.log, Glue), log, [zeroed(positive())], begun=True)

    assert "log: 2 of 40 elements" in replay_here(log.dumps[0], capsys)
    assert "the call had begun before it was recorded" in (log.dumps[0] / "replay.py").read_text()


def test_a_recompute_is_not_a_call(log: Told, capsys) -> None:
    """Under activation checkpointing a birth in the backward is the block's whose recompute ran there."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.root = nn.Linear(4, 8), Sqrt()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.root, self.fc(x), use_reentrant=False)

    model = Checkpointed()
    with torch.no_grad():
        model.fc.weight.copy_(torch.eye(4).repeat(2, 1))
        model.fc.bias.zero_()
    train(model, log, [positive(), zeroed(positive())])

    assert log.events[0]["site"] == "root:in.grad"
    assert "in SqrtBackward0" in replay_here(log.dumps[0], capsys)


def test_watching_changes_no_bit(log: Told) -> None:
    """Outputs, gradients, buffers, random numbers and pickles are those of the plain program."""

    def left(watched: bool) -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.ReLU(inplace=True),
            nn.Linear(8, 2),
        )
        optimizer = torch.optim.Adam(model.parameters())
        dump = FirstBadCall(log.place, log, lambda: 0) if watched else None
        if dump:
            dump.watch(model, lambda path: path)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().sum().backward()
            optimizer.step()
            if dump:
                dump.step_ended(suspicious=False)
        written = io.BytesIO()
        torch.save(model, written)
        pickled = pickle.dumps(copy.deepcopy(model))
        if dump:
            dump.close()
        written.seek(0)
        assert_unhooked(torch.load(written, weights_only=False))
        assert_unhooked(pickle.loads(pickled))
        return {
            "state": dict(model.state_dict()),
            "grads": [p.grad for p in model.parameters()],
            "rng": torch.get_rng_state(),
        }

    assert_same_bits(left(watched=True), left(watched=False))
    assert log.events == []


def test_what_is_kept_goes_with_the_graph_and_the_backward(log: Told) -> None:
    """Neither a forward without a backward nor a loss that lives on keeps a step's inputs."""
    model = net(nn.Tanh())
    dump = FirstBadCall(log.place, log, lambda: 0)
    dump.watch(model, lambda path: path)

    inputs: list[weakref.ref[Any]] = []
    handle = model.head.register_forward_pre_hook(
        lambda m, args: inputs.append(weakref.ref(args[0].untyped_storage()))
    )
    out = model(positive())
    assert inputs[0]() is not None
    del out
    gc.collect()
    assert inputs[0]() is None
    loss = model(positive()).sum()
    loss.backward()
    assert inputs[1]() is None
    handle.remove()
    dump.close()


def test_a_failure_of_its_own_never_ends_the_program(log: Told, monkeypatch, capsys) -> None:
    """It says so once, removes its hooks, and the program goes on."""
    monkeypatch.setattr("kedge.repro.finiteness._measurable", lambda value: 1 / 0)
    train(net(Log()), log, [positive(), zeroed(positive())])

    assert log.dumps == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "[kedge] --dump failed: ZeroDivisionError: division by zero (repro/finiteness.py:"
    )
    assert line.endswith("); it is off from here on, and the program goes on")


PROGRAM = """
import torch
from torch import nn

FLOOR = -1.0


class Shift(nn.Module):
    def forward(self, x):
        return (x + FLOOR).log()


from kedge.repro.first_bad_call import FirstBadCall
from pathlib import Path

model = nn.Sequential(nn.Linear(3, 3), Shift())


class Log:
    def event(self, event):
        print(event.kind)


dump = FirstBadCall(lambda: Path("run.kedge"), Log(), lambda: 0)
dump.watch(model, lambda path: path)
model(torch.zeros(2, 3)).sum().backward()
dump.close()
print("ran to the end")
"""


def test_classes_of_an_unguarded_script_are_imported_without_running_it(
    log: Told, tmp_path: Path
) -> None:
    """Of the program's own script only imports, definitions and constants are run."""
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "train.py"]
    ran = forked.run(command, cwd=tmp_path, check=True, forks=True)
    assert ran.stdout == "dump\nran to the end\n"

    told = replay(log.dumps[0])

    assert "ran to the end" not in told
    assert "return (x + FLOOR).log()" in told
    assert json.loads(json.dumps(told)).startswith("1 at step 0, forward, on cpu")


TRAIN = """
import torch
from torch import nn


class Log(nn.Module):
    def forward(self, x):
        return x.log()


def main():
    model = nn.Sequential(nn.Linear(3, 3), Log())
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3)), model[0].bias.fill_(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(15):
        x = torch.rand(2, 3)
        if step == 12:
            x[0, 0] = -1.0
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
"""


def test_a_watched_run_keeps_a_dump_that_the_finding_points_to(tmp_path: Path) -> None:
    """From the command to the finding to the script: each leads to the next."""
    (tmp_path / "train.py").write_text(TRAIN)
    kedge = [sys.executable, "-m", "kedge"]
    run = [*kedge, "run", "-q", "--dump", "--budget", "none", "-o", "run.kedge", "train.py"]
    forked.run(run, cwd=tmp_path, check=True, forks=True, ahead=forked.WATCH)
    checked = forked.run([*kedge, "check", "--json", "run.kedge"], cwd=tmp_path)
    (birth,) = [f for f in json.loads(checked.stdout)["findings"] if f["code"] == "NAN-BORN"]

    assert birth["evidence"]["dump"] == {"step": 12, "site": "1:out", "folder": "dump-12"}
    assert "log: 1 of 6 elements" in replay_without_kedge(tmp_path / "run.kedge" / "dump-12")


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.float64, torch.float8_e4m3fn, torch.bool, torch.int16], ids=str
)
def test_tensors_of_every_kind_are_saved(dtype: torch.dtype, log: Told, capsys) -> None:
    """Arguments of other dtypes are what they were."""
    given = torch.arange(4).to(dtype)
    train(Weighs(), log, [{"x": -torch.ones(4), "weights": given}])

    assert_same_bits(load_file(log.dumps[0] / "tensors.safetensors")["kwargs.weights"], given)
    assert "the first NaN in the forward: log: " in replay_here(log.dumps[0], capsys)


class Weighs(nn.Module):
    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return x.log() + weights.float().sum() * 0 if not weights.is_complex() else x.log()


class Halves(nn.Module):
    """Returns two outputs of one operation."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.clone().split(2, dim=1)


def lazy(dump: FirstBadCall) -> None:
    """Call a lazy model, which is followed from the middle of its first call: its buffers have no values yet."""
    begin(dump, model := nn.LazyBatchNorm1d())
    model(positive()).sum().backward()


def unused(dump: FirstBadCall) -> None:
    """Use one of the outputs of an operation."""
    dump.watch(model := Halves(), lambda path: path)
    model(positive().requires_grad_())[0].sum().backward()


def batched(dump: FirstBadCall) -> None:
    """Compute all rows of a Jacobian at once."""
    dump.watch(model := net(nn.Tanh()), lambda path: path)
    torch.autograd.functional.jacobian(model, positive(), vectorize=True)


@pytest.mark.parametrize("program", [lazy, unused, batched])
def test_what_has_no_values_is_passed_over(
    program: Callable[[FirstBadCall], None], log: Told, capsys
) -> None:
    """Buffers before they have a shape, the gradient of an unused output, and a wrapper of many gradients: no failure."""
    dump = FirstBadCall(log.place, log, lambda: 0)
    program(dump)
    dump.close()
    assert capsys.readouterr().err == ""


class Named(nn.Module):
    """A module that computes in a part of any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.fc, self.name = nn.Linear(4, 8), name
        self._modules[name] = Log()

    def forward(self, x: Tensor) -> Tensor:
        return self._modules[self.name](self.fc(x))


class Partly(Log):
    """What goes wrong, with an argument and a parameter of any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.given = functools.partial(dict, **{name: 1})
        self.register_parameter(name.replace(".", ""), nn.Parameter(torch.ones(2)))


HOSTILE = [
    'a"""\nimport sys\nsys.exit("read")\nx = """',
    "b\\",
    "c\nd\re",
    'f"',
    "\\N{g}",
    "\x1b[31m\u2028",
    '"]; sys.exit("read") #',
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_text_in_the_script(
    name: str, log: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a module is called, its name ends no string and no line of the script, which replays the call."""
    model = Named(name)
    model._modules[name] = Partly(name)
    train(model, log, [-torch.ones(5, 4)])

    told = replay_here(log.dumps[0], capsys)

    assert told.splitlines()[0].endswith("at step 0, forward, on cpu")
    assert "the first NaN in the forward: log" in told
    assert "missing(" not in (log.dumps[0] / "replay.py").read_text().split("# -- the tensors")[0]
