"""On real architectures: observing changes no bit, leaves nothing behind, and is silent about nothing."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.optim import optimizer as optimizer_hooks

pytest.importorskip("transformers")
from zoo import BY_NAME, ZOO, Architecture  # noqa: E402 - only where transformers is there

import kedge  # noqa: E402

EVERYTHING = "**:out, **:out.grad, **:in.grad, **:param.grad"
OBSERVERS: dict[str, Callable[[], Any]] = {
    "record": kedge.record,
    "function": lambda: lambda value: None,
    "measure": kedge.measure,
}
pytestmark = pytest.mark.filterwarnings("ignore::kedge.errors.NeverFiredWarning")
architectures = pytest.mark.parametrize("architecture", ZOO, ids=lambda a: a.name)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small only lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seed(number: int) -> None:
    """Set every generator that a model could draw from."""
    torch.manual_seed(number)
    np.random.seed(number)  # noqa: NPY002 - SpecAugment draws from this one
    random.seed(number)


def generators() -> dict[str, Any]:
    """Where every generator stands."""
    return {
        "rng.torch": torch.get_rng_state(),
        "rng.numpy": torch.from_numpy(np.random.get_state()[1].astype(np.int64)),  # type: ignore[index, union-attr] # noqa: NPY002
        "rng.python": torch.tensor(random.getstate()[1]),
    }


def tensors(value: Any, name: str) -> dict[str, Tensor]:
    """Every tensor inside an output, found without Kedge's help; a key-value cache is looked into as well."""
    if isinstance(value, Tensor):
        return {name: value.detach().clone()}
    if isinstance(value, Mapping):
        inside: Any = value.items()
    elif isinstance(value, (list, tuple)):
        inside = enumerate(value)
    elif dataclasses.is_dataclass(value) or type(value).__module__.startswith("transformers"):
        inside = vars(value).items()
    else:
        return {}
    found = {}
    for key, child in inside:
        found |= tensors(child, f"{name}.{key}")
    return found


def batch_of(architecture: Architecture) -> dict[str, Tensor]:
    """The inputs; those that can have a gradient ask for one, but for Wav2Vec2, which sets that itself and only on a leaf."""
    inputs = architecture.inputs()
    return {k: v.requires_grad_() if v.is_floating_point() and k != "input_values" else v for k, v in inputs.items()}


def train(architecture: Architecture, model: nn.Module, steps: int = 2) -> dict[str, Tensor]:
    """Train and return everything that came of it, by name."""
    seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    all_of_it: dict[str, Tensor] = {}
    for step in range(steps):
        batch = batch_of(architecture)
        optimizer.zero_grad()
        output = model(**batch)
        loss = architecture.loss(output)
        loss.backward()
        all_of_it |= tensors(output, f"{step}.output") | {f"{step}.loss": loss.detach().clone()}
        for name, leaf in {**dict(model.named_parameters()), **batch}.items():
            if leaf.grad is not None:
                all_of_it[f"{step}.grad.{name}"] = leaf.grad.clone()
        optimizer.step()
        all_of_it |= tensors(model.state_dict(), f"{step}.state") | generators()
    return all_of_it


def unlike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of what is not equal to the last bit, or not on both sides."""
    lacking = sorted(one.keys() ^ other.keys())
    return lacking + [n for n in one if n in other and not same(one[n], other[n])]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits; NaN is equal to itself."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(value: Tensor) -> Tensor:
    """The memory of a tensor as bytes."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def observed(architecture: Architecture, model: nn.Module, action: Any, sites: str = EVERYTHING) -> dict[str, Tensor]:
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
                found[f"{name}.{attribute}"] = id(value), list(value), [id(hook) for hook in value.values()]
    for name, param in [*model.named_parameters(), *model.named_buffers()]:
        found[f"{name} attributes"] = list(vars(param))
        for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            found[f"{name}.{attribute}"] = list((getattr(param, attribute) or {}).values())  # an empty table is none
    for place in (global_hooks, optimizer_hooks):
        for attribute, value in vars(place).items():
            if attribute.startswith("_global") and isinstance(value, dict):
                found[attribute] = list(value.items())
    return found


@pytest.mark.parametrize("observer", OBSERVERS)
@architectures
def test_observing_a_training_changes_no_bit(architecture: Architecture, observer: str) -> None:
    """Outputs, loss, gradients, generators and weights of two steps are those of a model nobody watches."""
    bare = train(architecture, architecture.build())
    watched = observed(architecture, architecture.build(), OBSERVERS[observer]())
    assert unlike(bare, watched) == []


def test_the_comparison_sees_one_changed_bit() -> None:
    """An edit of one gradient by one unit in the last place is found, so that equality above means something."""
    architecture = BY_NAME["bert"]
    bare = train(architecture, architecture.build())
    nudged = observed(
        architecture, architecture.build(), lambda g: torch.nextafter(g, torch.ones_like(g)), "bert.encoder.layer.1.output.dense.bias:param.grad"
    )  # fmt: skip
    different = unlike(bare, nudged)
    assert "0.grad.bert.encoder.layer.1.output.dense.bias" in different
    assert "0.grad.bert.encoder.layer.0.output.dense.bias" not in different


def test_the_comparison_sees_one_drawn_number() -> None:
    """An action that draws from the generator is found, so that equality of generators means something."""
    architecture = BY_NAME["bert"]
    bare = train(architecture, architecture.build())
    drawn = observed(architecture, architecture.build(), lambda value: torch.rand(1) and None, "cls:out")
    assert "rng.torch" in unlike(bare, drawn)


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "swin", "mixtral", "resnet"])
def test_observing_the_share_of_each_call_changes_no_bit(name: str) -> None:
    """Following what every call sends back to each input leaves the training as it is."""
    architecture = BY_NAME[name]
    bare = train(architecture, architecture.build())
    watched = observed(
        architecture, architecture.build(), kedge.record(), f"{EVERYTHING}, **:in, **:param, **:in.share"
    )
    assert unlike(bare, watched) == []


@pytest.mark.parametrize("observer", OBSERVERS)
@architectures
def test_a_session_leaves_the_hook_tables_as_they_were(architecture: Architecture, observer: str) -> None:
    """After a training step under observation every table and attribute is what it was, the user's hook among them."""
    model = architecture.build()
    train(architecture, model, steps=1)  # some models set attributes and hooks of their own in their first forward
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
def test_copies_of_a_hooked_model_are_those_of_an_unhooked_one(architecture: Architecture, ran: bool) -> None:
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


class Witness:
    """What plain PyTorch hooks say of every module: calls, tensors, and, from `torch.autograd.grad`, gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[tuple[str, str], list[Tensor]] = {}
        self.versions: dict[int, int] = {}
        self.called: set[str] = set()
        self.gradients: dict[tuple[str, str], list[Tensor | None]] = {}
        self.handles = ExitStack()
        for name, module in model.named_modules():
            self.handles.callback(module.register_forward_pre_hook(self._before(name), with_kwargs=True).remove)
            self.handles.callback(module.register_forward_hook(lambda m, a, o, n=name: self._keep(n, "out", o)).remove)

    def _before(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.called.add(name)
            self._keep(name, "in", (args, kwargs))

        return before

    def _keep(self, name: str, kind: str, value: Any) -> None:
        found = plain_leaves(value)
        self.values.setdefault((name, kind), []).extend(found)
        self.versions |= {id(t): t._version for t in found if id(t) not in self.versions}

    def differentiate(self, loss: Tensor) -> None:
        """Ask for the gradient of every tensor that was seen; None where the loss does not depend on it."""
        self.handles.close()
        asked = {id(t): t for ts in self.values.values() for t in ts if t.requires_grad}
        got = torch.autograd.grad(loss, list(asked.values()), allow_unused=True, retain_graph=True)
        by_id = dict(zip(asked, got, strict=True))
        self.gradients = {site: [by_id.get(id(t)) for t in ts] for site, ts in self.values.items()}

    def intact(self, path: str, kind: str) -> bool:
        """Whether no tensor of a site was changed in place after it was seen."""
        return all(t._version == self.versions[id(t)] for t in self.values[path, kind])


def plain_leaves(value: Any) -> list[Tensor]:
    """The tensors in tuples, lists, dicts and model outputs."""
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [t for child in inside for t in plain_leaves(child)]


def witnessed(architecture: Architecture) -> Witness:
    """The same training step as seen by plain PyTorch."""
    model = architecture.build()
    witness = Witness(model)
    seed(2)
    witness.differentiate(architecture.loss(model(**batch_of(architecture))))
    return witness


Truth = Callable[[Witness, nn.Module, str, str], bool]
"""Whether a cause is true of a module (or parameter) and a kind, as the witness saw it."""


def owners(model: nn.Module, path: str, kind: str) -> set[str]:
    """The module of a site; for a parameter every module that holds it."""
    if kind.partition(".")[0] != "param":
        return {path}
    param = model.get_parameter(path)
    return {
        name for name, module in model.named_modules() for held in module.parameters(recurse=False) if held is param
    }


def _uncalled(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    return not owners(model, path, kind) & w.called


def _no_tensor(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    return path in w.called and not w.values[path, kind.partition(".")[0]]


def _no_grad(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    return path in w.called and not any(t.requires_grad for t in w.values[path, kind.partition(".")[0]])


def _not_reached(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    if kind == "param.grad":
        return model.get_parameter(path).grad is None
    return all(g is None for g in w.gradients[path, kind.partition(".")[0]])


def _overwritten_view(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    side = kind.partition(".")[0]
    return any(t._is_view() for t in w.values[path, side]) and not w.intact(path, side)


def _frozen(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    return not model.get_parameter(path).requires_grad


def _reads_without_calling(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    parents = {owner.rpartition(".")[0] for owner in owners(model, path, kind)}
    return _uncalled(w, model, path, kind) and bool(parents & w.called)


# The beginning of a cause, and what must then be true. A cause that nobody can check is a failure.
TRUTHS: tuple[tuple[str, Truth], ...] = (
    ("its .forward() was called directly", lambda w, m, p, k: False),  # no model here does that
    ("never called", _uncalled),
    ("bypassed", _reads_without_calling),
    ("there is no tensor to see", _no_tensor),
    ("its value requires no grad", _no_grad),
    ("the backward that ran did not reach it", _not_reached),
    ("its value is a view", _overwritten_view),
    ("it requires no grad", _frozen),
)


def ledger_of(architecture: Architecture) -> tuple[nn.Module, Any, Any]:
    """One step with everything recorded: the model, the ledger and the handle."""
    model = architecture.build()
    with kedge.session() as s:
        acts = s.hook(model, f"{EVERYTHING}, **:in, **:param", kedge.record(copy=True))
        seed(2)
        architecture.loss(model(**batch_of(architecture))).backward()
        return model, s.ledger(), acts


@architectures
def test_every_site_fired_or_has_a_cause_that_is_true(architecture: Architecture) -> None:
    """Where a site is silent, what the ledger says of it agrees with what plain PyTorch hooks saw."""
    model, ledger, _ = ledger_of(architecture)
    witness = witnessed(architecture)
    false = []
    for entry in ledger:
        if entry.fired:
            continue
        assert entry.cause is not None and entry.cause.remedy, entry
        truth = next((t for beginning, t in TRUTHS if entry.cause.why.startswith(beginning)), None)
        assert truth is not None, f"{entry} is a cause that this test cannot check"
        if not truth(witness, model, entry.site.path, entry.site.kind):
            false.append(str(entry))
    assert false == []


@architectures
def test_no_site_is_silent_that_plain_hooks_see(architecture: Architecture) -> None:
    """Every tensor and every gradient that plain PyTorch can show at a module has fired there."""
    model, ledger, _ = ledger_of(architecture)
    witness = witnessed(architecture)
    missed = [str(e) for e in ledger if not e.fired and visible(witness, model, e.site.path, e.site.kind)]
    assert missed == []


def visible(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    """Whether plain PyTorch has something to show at a site."""
    side, _, gradient = kind.partition(".")
    if side == "param":
        return model.get_parameter(path).grad is not None if gradient else not _uncalled(w, model, path, kind)
    return any(t is not None for t in (w.gradients if gradient else w.values).get((path, side), []))


@architectures
def test_what_is_recorded_is_what_autograd_says(architecture: Architecture) -> None:
    """Outputs, inputs and their gradients are, to the last bit, those of plain hooks and `torch.autograd.grad`."""
    _, ledger, acts = ledger_of(architecture)
    witness = witnessed(architecture)
    wrong, compared = [], 0
    for entry in ledger:
        side, _, gradient = entry.site.kind.partition(".")
        if not entry.fired or side == "param" or not witness.intact(entry.site.path, side):
            continue
        expected = (witness.gradients if gradient else witness.values)[entry.site.path, side]
        got = [value for _, value in acts.records(str(entry.site))]
        if not same_set([t for t in expected if t is not None], got):
            wrong.append(str(entry.site))
        compared += len(got)
    assert wrong == []
    assert compared > 50


def same_set(expected: list[Tensor], got: list[Tensor]) -> bool:
    """Whether the same tensors are on both sides, in any order: gradients arrive last call first."""
    return sorted(map(key, expected)) == sorted(map(key, got))


def key(value: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """All that makes a tensor what it is."""
    return str(value.dtype), tuple(value.shape), bits(value).numpy().tobytes()


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "vit", "segformer", "whisper"])
def test_the_share_of_a_call_is_what_pytorch_calls_grad_input(name: str) -> None:
    """For every module with positional tensors in and one tensor out, ``in.share`` is what a full backward hook gets."""
    architecture = BY_NAME[name]
    model = architecture.build()
    with kedge.session() as s:
        acts = s.hook(model, "**:in.share", kedge.record())
        seed(2)
        architecture.loss(model(**batch_of(architecture))).backward()
        silent = {e.site.path for e in s.ledger() if not e.fired}
    expected = grad_inputs(architecture)
    wrong = []
    for path, grads in expected.items():
        got = [] if path in silent else [value for _, value in acts.records(f"{path}:in.share")]
        if len(got) != len(grads) or not all(any(close(a, b) for b in got) for a in grads):
            wrong.append(path)
    assert wrong == []
    assert len(expected) >= 10


def grad_inputs(architecture: Architecture) -> dict[str, list[Tensor]]:
    """What full backward hooks receive at modules of tensors in and out."""
    model = architecture.build()
    found: dict[str, list[Tensor]] = {}

    def listen(path: str) -> Callable[..., None]:
        return lambda module, given, arriving: found.setdefault(path, []).extend(
            g.clone() for g in given if g is not None
        )

    for path, module in model.named_modules():
        if type(module).__name__.endswith(("Linear", "LayerNorm", "Conv2d", "Conv1D", "Output")):
            module.register_full_backward_hook(listen(path))
    seed(2)
    architecture.loss(model(**batch_of(architecture))).backward()
    return {path: grads for path, grads in found.items() if grads}


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding: the identities of full backward hooks change the order of additions."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-7)
