"""What is on a model already: every kind of hook is found, with its place, owner and order, and nothing is touched."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.optim import optimizer as optimizers

import kedge
from kedge.inspection.audit import EVERY_MODULE, EVERY_OPTIMIZER, KINDS, HookEntry, audit
from tests import forked

MODULE = {
    "register_forward_pre_hook": "forward-pre",
    "register_forward_hook": "forward",
    "register_full_backward_pre_hook": "full-backward-pre",
    "register_full_backward_hook": "full-backward",
    "register_backward_hook": "legacy-backward",
    "register_state_dict_pre_hook": "state-dict-pre",
    "register_state_dict_post_hook": "state-dict",
    "_register_state_dict_hook": "state-dict",
    "register_load_state_dict_pre_hook": "load-state-dict-pre",
    "_register_load_state_dict_pre_hook": "load-state-dict-pre",
    "register_load_state_dict_post_hook": "load-state-dict",
}
TENSOR = {"register_hook": "tensor", "register_post_accumulate_grad_hook": "post-accumulate"}
EVERYWHERE = {
    "register_module_forward_pre_hook": "forward-pre",
    "register_module_forward_hook": "forward",
    "register_module_full_backward_pre_hook": "full-backward-pre",
    "register_module_full_backward_hook": "full-backward",
    "register_module_backward_hook": "legacy-backward",
    "register_module_module_registration_hook": "registration",
    "register_module_parameter_registration_hook": "registration",
    "register_module_buffer_registration_hook": "registration",
}
OPTIMIZERS = {
    "register_optimizer_step_pre_hook": "optimizer-step-pre",
    "register_optimizer_step_post_hook": "optimizer-step",
}
HERE = Path(__file__).name


def nothing(*_: Any) -> None:
    """A hook of any kind."""


def net() -> nn.Sequential:
    """Make two layers with an activation between."""
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


def only(model: nn.Module) -> HookEntry:
    """The one hook that is on a model."""
    (entry,) = audit(model)
    return entry


def line_of(function: Any) -> int:
    """The line on which a function of this file begins."""
    return function.__code__.co_firstlineno


@pytest.mark.parametrize("way", MODULE)
def test_a_modules_hook_is_found(way: str) -> None:
    """Whatever way it was registered, it stands there with kind, path, type, name and line."""

    def hook(*_: Any) -> None:
        """Not `nothing`: state-dict hooks are marked by the way they were registered."""

    model = net()
    getattr(model[2], way)(hook)
    entry = only(model)

    assert (entry.kind, entry.path, entry.type, entry.order, entry.name) == (
        MODULE[way],
        "2",
        "Linear",
        0,
        "hook",
    )
    assert entry.owner == entry.source
    assert entry.source.endswith(f"{HERE}:{line_of(hook)}")
    assert audit(model).of(entry.kind) == (entry,)


@pytest.mark.parametrize("way", TENSOR)
@pytest.mark.parametrize("buffer", [True, False])
def test_a_tensors_hook_is_found(way: str, buffer: bool) -> None:
    """On a parameter and on a buffer, under its name."""
    model = net()
    model[2].register_buffer("table", torch.ones(2, requires_grad=True))
    getattr(model[2].table if buffer else model[2].weight, way)(nothing)
    entry = only(model)

    expected = ("2.table", "buffer") if buffer else ("2.weight", "Parameter")
    assert (entry.kind, entry.path, entry.type, entry.name) == (TENSOR[way], *expected, "nothing")


@pytest.mark.parametrize("way", EVERYWHERE | OPTIMIZERS)
def test_a_global_hook_is_found(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for every module or optimizer is on this model too."""
    monkeypatch.setattr(modules, "_global_is_full_backward_hook", None)
    owner, place = (modules, EVERY_MODULE) if way in EVERYWHERE else (optimizers, EVERY_OPTIMIZER)
    with getattr(owner, way)(nothing):
        entry = only(net())

    assert (entry.kind, entry.path, entry.type, entry.name) == (
        (EVERYWHERE | OPTIMIZERS)[way],
        place,
        "",
        "nothing",
    )
    assert len(audit(net())) == 0


def test_every_way_to_register_a_hook_is_known() -> None:
    """A new kind of hook in PyTorch does not go unnoticed: these are all the ways there are."""
    for owner, known in (
        (nn.Module, MODULE),
        (Tensor, TENSOR),
        (modules, EVERYWHERE),
        (optimizers, OPTIMIZERS),
    ):
        ways = {
            way
            for way in dir(owner)
            if way.lstrip("_").startswith("register_") and way.endswith("_hook")
        }
        assert ways == set(known)


def test_every_table_of_hooks_is_read() -> None:
    """PyTorch's tables of a module are those that the ways to register fill."""
    model = nn.Module()
    for way in set(MODULE) - {"register_full_backward_hook"}:
        getattr(model, way)(lambda *_: None)
    tables = [
        name for name, table in vars(model).items() if "hooks" in name and hasattr(table, "items")
    ]

    assert [
        t
        for t in tables
        if not getattr(model, t) and not t.endswith(("_with_kwargs", "_always_called"))
    ] == []
    assert len(audit(model)) == len(MODULE) - 1


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ({}, ()),
        ({"with_kwargs": True}, ("with_kwargs",)),
        ({"with_kwargs": True, "always_call": True}, ("with_kwargs", "always_call")),
    ],
)
def test_an_audit_says_how_a_forward_hook_was_registered(
    options: dict[str, bool], notes: tuple[str, ...]
) -> None:
    """With keyword arguments, and even if forward raises."""
    model = net()
    model.register_forward_hook(nothing, **options)

    assert only(model).notes == notes


def test_flags_of_one_table_are_not_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pre-hook with keyword arguments says nothing of a forward hook; global hooks have flags as well."""
    monkeypatch.setattr(
        modules, "_global_forward_hooks_with_kwargs", {}
    )  # PyTorch does not take the flag away again
    model = net()
    model.register_forward_pre_hook(nothing, with_kwargs=True)
    model.register_forward_hook(nothing)
    with modules.register_module_forward_hook(nothing, with_kwargs=True, always_call=True):
        notes = [entry.notes for entry in audit(model)]

    assert notes == [("with_kwargs",), (), ("with_kwargs", "always_call")]


class Named:
    """A hook that says when it fires."""

    def __init__(self, name: str, fired: list[str]) -> None:
        self.name, self.fired = name, fired

    def __call__(self, *_: Any) -> None:
        """A hook."""
        self.fired.append(self.name)


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_a_modules_hooks_are_in_the_order_in_which_they_fire(kind: str) -> None:
    """A prepended one comes first, and global ones before a module's own."""
    model, fired = nn.Linear(3, 3), []
    register = getattr(model, f"register_{kind}_hook")
    register(Named("second", fired))
    register(functools.partial(Named("third", fired)))
    register(Named("first", fired).__call__, prepend=True)
    names = {"partial(Named)": "third", "Named": "second", "Named.__call__": "first"}
    with getattr(modules, f"register_module_{kind}_hook")(Named("global", fired)):
        model(torch.ones(1, 3, requires_grad=True)).sum().backward()
        entries = audit(model).of(kind.replace("_", "-"))

    assert fired == ["global", "first", "second", "third"]
    assert [(names[e.name], e.order) for e in entries if e.type] == [
        ("first", 0),
        ("second", 1),
        ("third", 2),
    ]
    assert [(e.path, e.order) for e in entries if not e.type] == [(EVERY_MODULE, 0)]


@pytest.mark.parametrize("way", TENSOR)
def test_a_tensors_hooks_are_in_the_order_in_which_they_fire(way: str) -> None:
    """As they were registered."""
    model, fired = nn.Linear(3, 3), []
    getattr(model.weight, way)(Named("first", fired))
    getattr(model.weight, way)(functools.partial(Named("second", fired)))
    model(torch.ones(1, 3)).sum().backward()

    assert fired == ["first", "second"]
    assert [(e.name, e.order) for e in audit(model)] == [("Named", 0), ("partial(Named)", 1)]


class Recorder:
    """A hook that is an object."""

    def __call__(self, *_: Any) -> None:
        """A hook."""

    def keep(self, *_: Any) -> None:
        """Another hook."""


def wrapped(function: Any) -> Any:
    """Decorate."""

    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


anonymous = lambda *_: None


@pytest.mark.parametrize(
    ("hook", "name", "code"),
    [
        (nothing, "nothing", nothing),
        (anonymous, "lambda", anonymous),
        (functools.partial(nothing, 1), "partial(nothing)", nothing),
        (functools.partial(functools.partial(nothing, 1), 2), "partial(nothing)", nothing),
        (Recorder(), "Recorder", Recorder.__call__),
        (Recorder().keep, "Recorder.keep", Recorder.keep),
        (functools.partial(Recorder().keep, 1), "partial(Recorder.keep)", Recorder.keep),
        (wrapped(nothing), "nothing", nothing),
        (torch.no_grad()(nothing), "nothing", nothing),
    ],
)
def test_somebodys_own_hook_is_named_with_file_and_line(hook: Any, name: str, code: Any) -> None:
    """Through partials, bound methods, objects and decorators."""
    model = net()
    model.register_forward_hook(hook)
    entry = only(model)

    assert entry.name == name
    assert entry.owner == entry.source
    assert entry.source.endswith(f"{HERE}:{line_of(code)}")


def test_a_file_is_named_from_where_one_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path below the current folder is short."""
    model = net()
    model.register_forward_hook(nothing)
    monkeypatch.chdir(Path(__file__).parent)

    assert only(model).owner == f"{HERE}:{line_of(nothing)}"


def test_a_hook_without_code_is_built_in() -> None:
    """Functions written in C have no line."""
    model = net()
    model.register_forward_hook(max)  # some libraries put a `print` of their own in its place

    assert (only(model).name, only(model).owner, only(model).source) == ("max", "built in", "")


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    ("apply", "found"),
    [
        (weight_norm, {("forward-pre", "WeightNorm of weight", "torch weight_norm")}),
        (lambda m: prune.l1_unstructured(m, "weight", 0.5), {("forward-pre", "L1Unstructured of weight", "torch pruning")}),
        (spectral_norm, {
            ("forward-pre", "SpectralNorm of weight", "torch spectral_norm"),
            ("state-dict", "SpectralNormStateDictHook", "torch spectral_norm"),
            ("load-state-dict-pre", "SpectralNormLoadStateDictPreHook", "torch spectral_norm"),
        }),
        (parametrizations.orthogonal, {("parametrization", "_Orthogonal", "torch parametrization")}),
    ],
)  # fmt: skip
def test_hooks_of_torch_utilities_are_known(apply: Any, found: set[tuple[str, str, str]]) -> None:
    """By what they compute, and whose they are."""
    model = nn.Sequential(apply(nn.Linear(3, 3)))

    assert {(e.kind, e.name, e.owner) for e in audit(model)} == found


class Twice(nn.Module):
    """A parametrization of somebody's own."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_parametrizations_stand_in_order_at_their_tensor() -> None:
    """Each with its own owner."""
    model = nn.Sequential(nn.Linear(3, 3))
    parametrize.register_parametrization(model[0], "weight", Twice())
    parametrizations.orthogonal(model[0])
    entries = audit(model).of("parametrization")

    assert [(e.path, e.order, e.name) for e in entries] == [
        ("0.weight", 0, "Twice"),
        ("0.weight", 1, "_Orthogonal"),
    ]
    assert entries[0].source.endswith(f"{HERE}:{line_of(Twice.forward)}")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library that is installed where libraries are."""
    package = tmp_path / "lib" / "site-packages" / "fastenings"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "hooks.py").write_text(
        "def hold(*args):\n    pass\n\n\nclass Clamp:\n    def __call__(self, *args):\n        pass\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    yield importlib.import_module("fastenings.hooks")
    for name in ("fastenings", "fastenings.hooks"):
        sys.modules.pop(name, None)


def test_a_librarys_hook_is_named_after_the_library(library: Any) -> None:
    """By the package that its code is installed in."""
    model = net()
    model[0].register_forward_hook(library.hold)
    model[1].register_forward_hook(library.Clamp())
    model.forward = functools.partial(library.hold, model)
    found = [(e.kind, e.path, e.name, e.owner) for e in audit(model)]

    assert found == [
        ("replaced-forward", "", "partial(hold)", "fastenings"),
        ("forward", "0", "hold", "fastenings"),
        ("forward", "1", "Clamp", "fastenings"),
    ]
    assert audit(model).of("replaced-forward")[0].source.endswith("hooks.py:1")


@pytest.mark.parametrize(
    ("module", "owner"),
    [
        ("torch.distributed.fsdp._fully_shard._fsdp_state", "torch FSDP"),
        ("torch.nn.parallel.distributed", "torch DDP"),
        ("torch.ao.quantization.observer", "torch quantization"),
        ("torch.nn.modules.lazy", "torch"),
        ("torchvision.ops", ""),
        ("kedge_of_mine.hooks", ""),
    ],
)
def test_parts_of_torch_are_told_apart(module: str, owner: str) -> None:
    """By the module that their code is in; what only begins alike is somebody's own."""
    hook = lambda *_: None
    hook.__module__ = module
    model = net()
    model.register_forward_hook(hook)

    assert only(model).owner == (owner or only(model).source)


def test_kedges_hooks_are_listed_with_what_they_serve() -> None:
    """Sites and actions of a session stand beside its hooks."""
    model = net()
    with kedge.session() as s:
        s.hook(model, "0, 0:out.grad", kedge.record())
        s.hook(model, "2:in", nothing_of_it, when=kedge.every(5))
        s.hook(model, "0.bias:param.grad, 0.bias:param.acc", kedge.scale(2))
        found = {(e.kind, e.path): e for e in audit(model)}
        model(torch.ones(1, 3, requires_grad=True)).sum().backward()

    assert {e.owner for e in found.values()} == {"kedge"}
    serves = {
        place: [note for note in e.notes if note.startswith(":")] for place, e in found.items()
    }
    assert serves["forward", "0"] == [":out record()", ":out.grad record()"]
    assert serves["forward-pre", "2"] == [":in nothing_of_it"]
    assert serves["tensor", "0.bias"] == [":param.grad scale(2)"]
    assert serves["post-accumulate", "0.bias"] == [":param.acc scale(2)"]
    assert "counts forward passes" in found["forward", ""].notes
    assert ("optimizer-step", EVERY_OPTIMIZER) in found
    assert len(audit(model)) == 0


def test_hooks_of_other_places_are_listed_with_what_they_serve() -> None:
    """Skipped modules, edited parameters, variables, and operations outside of modules."""
    model = net()
    with kedge.session() as s:
        s.hook(model, "0", kedge.skip())
        s.hook(model, "2.bias:param", kedge.scale(2))
        s.hook(model, "/input=", kedge.record())
        s.hook("/exp", kedge.record())
        notes = [note for each in audit(model) for note in each.notes]
        s.end(quiet=True)
    assert ":out skip()" in notes
    assert notes.count("2.bias:param scale(2)") == 2  # on the model and on the layer
    assert "shows what a forward assigns to a variable" in notes
    assert "finds what is outside of modules" in notes


def nothing_of_it(value: Tensor) -> None:
    """An action."""


def test_kedge_tells_where_it_copies_before_in_place_work() -> None:
    """A session that records stands before modules that work in place."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    with kedge.hook(model, "0", kedge.record()):
        (entry,) = (e for e in audit(model) if e.path == "1")
        model(torch.ones(1, 3))

    assert entry.notes == ("with_kwargs", "copies records before they are overwritten")


def test_what_has_several_names_stands_under_the_first() -> None:
    """A module or parameter that is used twice is hooked once."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.append(model[0])
    model[1].weight = model[0].weight
    model[2].register_forward_hook(nothing)
    model[1].weight.register_hook(nothing)

    assert [(e.kind, e.path) for e in audit(model)] == [("forward", "0"), ("tensor", "0.weight")]


def test_a_compiled_model_is_looked_into(compiled: Any) -> None:
    """Paths are those of the model inside; the wrapper and its own hooks are listed too."""
    model = net()
    model[0].register_forward_hook(nothing)
    model[2].compile(backend="eager")
    wrapper = compiled(model, backend="eager")
    wrapper.register_forward_hook(nothing)
    found = [(e.kind, e.path, e.type, e.name) for e in audit(wrapper)]

    assert found == [
        ("compiled", "", "OptimizedModule", "torch.compile"),
        ("forward", "", "OptimizedModule", "nothing"),
        ("forward", "0", "Linear", "nothing"),
        ("compiled", "2", "Linear", "Module.compile"),
    ]
    assert [e.owner for e in audit(wrapper).of("compiled")] == ["torch", "torch"]


def test_a_compiled_part_is_found(compiled: Any) -> None:
    """A wrapper inside a model has PyTorch's own names."""
    model = nn.ModuleDict({"part": compiled(nn.Linear(3, 3), backend="eager")})
    model["part"]._orig_mod.register_forward_hook(nothing)

    assert [(e.kind, e.path) for e in audit(model)] == [
        ("compiled", "part"),
        ("forward", "part._orig_mod"),
    ]


def test_a_model_without_hooks_says_so() -> None:
    """There is nothing to list; scripted modules have forwards of their own by nature."""
    for model in (net(), torch.fx.symbolic_trace(net())):
        assert str(audit(model)) == "this model has no hooks"
        assert len(audit(model)) == 0
        assert list(audit(model)) == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is (deprecated|not supported)")
def test_a_scripted_model_is_not_taken_for_a_changed_one() -> None:
    """TorchScript keeps each module's forward on the instance."""
    assert len(audit(torch.jit.script(net()))) == 0


def test_looking_changes_nothing_and_calls_nothing(tables: Any) -> None:
    """Hook tables, attributes and random numbers are as before, and no hook, forward or parametrization ran."""
    model = nn.Sequential(
        nn.Linear(3, 3),
        spectral_norm(nn.Linear(3, 3)),
        parametrizations.weight_norm(nn.Linear(3, 3)),
    )
    for way in set(MODULE) - {"register_backward_hook"}:
        getattr(model[0], way)(lambda *_: pytest.fail("a hook ran"))
    parametrize.register_parametrization(model[0], "weight", Counting())
    ran = Counting.ran
    model[0].bias.register_hook(lambda *_: pytest.fail("a hook ran"))
    before, state = tables(model), torch.get_rng_state()
    str(audit(model))

    assert tables(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert Counting.ran == ran


class Counting(nn.Module):
    """A parametrization that counts how often it ran."""

    ran = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.ran += 1
        return x


def test_an_audit_is_a_value() -> None:
    """It stays what it is when the model changes; equal ones are equal; nobody can write to it."""
    model = net()
    handle = model.register_forward_hook(nothing)
    first, again = audit(model), audit(model)
    handle.remove()

    assert first == again
    assert hash(first) == hash(again)
    assert first != audit(model)
    assert len(first) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.entries = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        only_entry(first).kind = "tensor"


def only_entry(found: Any) -> HookEntry:
    """The one entry of an audit."""
    (entry,) = found
    return entry


def test_an_entry_prints_as_a_line() -> None:
    """Kind, order, place, name, owner and notes."""
    model = net()
    model.register_forward_hook(nothing)
    model[2].register_forward_hook(nothing, always_call=True)
    with modules.register_module_forward_hook(max):
        first, second, third = map(str, audit(model))

    assert (
        first == f"forward 0 on the model (Sequential): nothing, {audit(model).entries[0].source}"
    )
    assert second.startswith("forward 0 on 2 (Linear): nothing, ")
    assert second.endswith(", always_call")
    assert third == "forward 0 on every module: max, built in"


def test_an_unknown_kind_is_refused() -> None:
    """The message names the kinds."""
    with pytest.raises(
        ValueError,
        match=r'"backward" is not a kind of hook; kinds are compiled, .*full-backward, legacy',
    ):
        audit(net()).of("backward")
    assert len(set(KINDS)) == len(KINDS)


@pytest.mark.parametrize(
    ("what", "said"), [(3, "3"), (nn.Linear, "the class Linear"), ([nn.ReLU()], "a list")]
)
def test_what_has_no_hooks_of_its_own_is_refused(what: Any, said: str) -> None:
    """The message says what it is, and what there is an audit of."""
    with pytest.raises(
        TypeError,
        match=rf"a torch.nn.Module, a tensor, an autograd node or an optimizer, not {said}",
    ):
        audit(what)


def test_hooks_on_nodes_and_on_one_optimizer_are_not_seen() -> None:
    """They are not on the model: this is what the documentation says that an audit leaves out."""
    model = nn.Linear(3, 3)
    node = torch.autograd.graph.get_gradient_edge(model.weight).node
    handle = node.register_prehook(nothing)
    torch.optim.SGD(model.parameters()).register_step_post_hook(nothing)

    assert len(audit(model)) == 0
    handle.remove()


class Deep(nn.Module):
    """Two hundred modules."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(66))
        self.head = nn.Linear(2, 2)


def test_the_table_of_a_large_model_is_short() -> None:
    """Places that carry the same hooks stand in one group, with their number; those that differ stand apart."""
    model = Deep()
    assert len(list(model.modules())) == 201
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(nothing)
    for p in model.parameters():
        p.register_hook(functools.partial(nothing, p))
    model.head.register_full_backward_hook(nothing)
    text = str(audit(model))
    here = audit(model).entries[0].source

    assert text.splitlines()[:12] == [
        "202 hooks on Deep: 67 forward, 1 full-backward, 134 tensor",
        "",
        "on 66 modules: blocks.0.0, blocks.1.0, blocks.2.0 and 63 more (Linear)",
        f"  0  forward        nothing           {here}",
        "on head (Linear)",
        f"  0  forward        nothing           {here}",
        f"  0  full-backward  nothing           {here}",
        "on 134 tensors: blocks.0.0.weight, blocks.0.0.bias, blocks.1.0.weight and 131 more (Parameter)",
        f"  0  tensor         partial(nothing)  {here}",
        "",
        "effects (! may cause harm)",
        text.splitlines()[11],
    ]
    assert len(text.splitlines()) < 30


def test_each_sentence_is_printed_once_and_what_may_hurt_first() -> None:
    """With the hooks it is true of: one by its place, several by their number."""
    model = net()
    for module in model:
        module.register_forward_hook(nothing)
    model[2].register_full_backward_hook(nothing)
    text = str(audit(model))
    lines = text[text.index("effects") :].splitlines()[1:]
    marks = [line[0] for line in lines if line[2:3].strip()]

    assert marks == sorted(marks, reverse=True)
    assert Counter(marks) == {"!": 3, " ": 3}
    assert "! in-place   full-backward nothing on 2: an in-place operation" in text
    assert text.count("  compile    forward nothing (3 hooks): ") == 1
    assert max(map(len, lines)) <= 118


def test_what_does_no_harm_has_no_mark() -> None:
    """A table without anything that may hurt does not speak of it."""
    model = net()
    model[0].weight.register_hook(nothing)

    assert "\neffects\n  compile    tensor nothing on 0.weight: runs outside" in str(audit(model))


def test_the_documentation_shows_what_is_printed(tmp_path: Path) -> None:
    """The output on the page is that of the example above it."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "audit.md").read_text(encoding="utf-8")
    example, shown = (
        re.search(rf"```{language}\n(.*?)```", page, re.DOTALL)[1]
        for language in ("python", "text")
    )
    (tmp_path / "train.py").write_text(example, encoding="utf-8")
    command = [sys.executable, "train.py"]
    ran = forked.run(command, cwd=tmp_path, check=True)

    assert ran.stdout == shown
