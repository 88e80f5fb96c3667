"""The existing hooks on a model: every hook, its owner, and its effects.

It calls and changes nothing: it reads the tables of hooks, and the hooks' own source and attributes.
"""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from kedge import notebook
from kedge.inspect.effects import (
    BACKWARD,
    FORWARD,
    STATE,
    TENSOR,
    CopyTrial,
    Effect,
    FoundHook,
    Standing,
    effects,
    function_in,
    standings,
)
from kedge.inspect.owners import library_of, name_of, serves, source_of
from kedge.numbers import listed
from kedge.torch_internals import dynamo, hook_tables

EVERY_MODULE, EVERY_OPTIMIZER = "every module", "every optimizer"
KINDS = (
    "compiled", "replaced-forward", "parametrization", *FORWARD, *BACKWARD, *TENSOR, *STATE,
    "optimizer-step-pre", "optimizer-step", "registration",
)  # fmt: skip

_TENSORS = ("Parameter", "buffer", "parametrized")
_SHOWN = 3
_WIDTH = 118


@dataclass(frozen=True)
class HookEntry:
    """One hook that is on a model.

    Attributes:
        kind: One of `KINDS`.
        path: The first name of its module or tensor; "every module" or "every optimizer" for global hooks.
        type: Class name of that module, "Parameter" or "buffer"; empty for global hooks.
        order: Its place in the firing order among the hooks of its kind there, from 0. Global hooks come before a
            module's own.
        name: The name of the function.
        owner: "kedge", a library, or file and line of the program's own code.
        source: File and line of the code; empty if it has none.
        notes: How it was registered (with_kwargs, always_call), and the sites and actions that a Kedge hook serves.
        effects: Its effects on compile, gradients, in-place operations, pickle, deepcopy and state_dict.
    """

    kind: str
    path: str
    type: str
    order: int
    name: str
    owner: str
    source: str
    notes: tuple[str, ...]
    effects: tuple[Effect, ...]

    def __str__(self) -> str:
        """One line."""
        named = (self.path or "the model") + (f" ({self.type})" if self.type else "")
        return ", ".join((f"{self.kind} {self.order} on {named}: {self.name}", self.owner, *self.notes))


@dataclass(frozen=True)
class Audit:
    """The hooks that are on a model, in the model's order and in each place in firing order.

    Attributes:
        model: Class name of the model.
        entries: The hooks.
    """

    model: str
    entries: tuple[HookEntry, ...]

    def __iter__(self) -> Iterator[HookEntry]:
        """The hooks, one by one."""
        return iter(self.entries)

    def __len__(self) -> int:
        """The number of hooks."""
        return len(self.entries)

    def of(self, kind: str) -> tuple[HookEntry, ...]:
        """The hooks of one kind.

        Raises:
            ValueError: If there is no such kind of hook.
        """
        if kind not in KINDS:
            raise ValueError(f'"{kind}" is not a kind of hook; kinds are {", ".join(KINDS)}')
        return tuple(e for e in self.entries if e.kind == kind)

    def __str__(self) -> str:
        """A table by place, equal places in one, and below it the effects of the hooks, harmful ones first."""
        if not self.entries:
            return "this model has no hooks"
        return "\n".join([_headline(self), "", *_places(self.entries), "", *_sentences(self.entries)])

    def _repr_html_(self) -> str:
        """The hooks and their effects, for a notebook."""
        if not self.entries:
            return notebook.paragraph(str(self))
        hooks = [(e.path or "the model", e.type, e.order, e.kind, e.name, e.owner, ", ".join(e.notes)) for e in self]
        columns = ("place", "type", "order", "kind", "name", "owner", "notes")
        done = [(effect.on, _subject(on), effect.what) for effect, on in _by_effect(self.entries)]
        effects_ = notebook.table(("to", "hooks", "effects"), done, align="l") if done else ""
        return notebook.table(columns, hooks, title=_headline(self), align="mmrlm") + effects_


def audit(model: nn.Module) -> Audit:
    """Return every hook that is on a model already: its owner, its place in the firing order, and its effects.

    It sees hooks on modules, parameters and buffers, on all modules and all optimizers,
    parametrizations, a ``forward`` that was replaced, and `torch.compile`. It cannot see hooks on
    autograd nodes (`torch.nn.parallel.DistributedDataParallel` has its own there), nor those on one
    optimizer.

    Args:
        model: The model; compiled ones too.

    Raises:
        TypeError: If it is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"audit takes a torch.nn.Module, not a {type(model).__name__}")
    inner = dynamo.unwrap(model)
    named = [*([("", model)] if inner is not model else []), *inner.named_modules()]
    where = standings(module for _, module in named)
    everywhere = _on_everything("inside" if where else "")
    trial = CopyTrial({id(module) for _, module in named})
    found = itertools.chain(_on_modules(named, where), _on_tensors(inner), everywhere)
    return Audit(type(inner).__name__, tuple(_entry(f, trial) for f in found))


def _on_modules(named: list[tuple[str, nn.Module]], where: Mapping[int, Standing]) -> Iterator[FoundHook]:
    for path, module in named:
        for found in _on_module(module):
            name = f"{path}{found.path}".removeprefix(".")
            yield replace(found, path=name, compiled=where.get(id(module), ""))


def _on_module(module: nn.Module) -> Iterator[FoundHook]:
    """Yield the hooks on one module, as if it were the whole model."""
    own, name = vars(module), type(module).__name__
    if dynamo.unwrap(module) is not module:
        yield FoundHook("compiled", "torch.compile", "", name, module=module)
    elif "forward" in own and not isinstance(module, torch.jit.ScriptModule):
        yield FoundHook("replaced-forward", own["forward"], "", name, module=module)
    if dynamo.is_compiled_in_place(module):
        yield FoundHook("compiled", "Module.compile", "", name, module=module)
    if parametrize.is_parametrized(module):
        for tensor, several in module.parametrizations.items():  # type: ignore[operator,union-attr]
            for i, one in enumerate(several):
                yield FoundHook("parametrization", one, f".{tensor}", "parametrized", i, module)
    for one in hook_tables.hooks_on_module(module):
        yield FoundHook(one.kind, one.hook, "", name, one.order, module, one.flags)


def _on_tensors(model: nn.Module) -> Iterator[FoundHook]:
    named: list[tuple[str, Tensor, str]] = [(name, p, "Parameter") for name, p in model.named_parameters()]
    named += [(name, b, "buffer") for name, b in model.named_buffers()]
    for name, tensor, type_ in named:
        for one in hook_tables.hooks_on_tensor(tensor):
            yield FoundHook(one.kind, one.hook, name, type_, one.order)


def _on_everything(standing: Standing) -> Iterator[FoundHook]:
    for one in hook_tables.hooks_on_every_module():
        where = "" if one.kind == "registration" else standing
        yield FoundHook(one.kind, one.hook, EVERY_MODULE, "", one.order, None, one.flags, where)
    for one in hook_tables.hooks_on_every_optimizer():
        yield FoundHook(one.kind, one.hook, EVERY_OPTIMIZER, "", one.order)


def _entry(found: FoundHook, trial: CopyTrial) -> HookEntry:
    function = function_in(found.hook)
    source, owner = source_of(function), library_of(function)
    found = replace(found, ours=owner == "kedge")
    notes = found.flags + (serves(found.hook) if found.ours else ())
    name = found.hook if found.kind == "compiled" else name_of(found.hook)
    owner = "torch" if found.kind == "compiled" else owner or source or "built in"
    return HookEntry(found.kind, found.path, found.type, found.order, name, owner, source, notes, effects(found, trial))


def _headline(audit: Audit) -> str:
    kinds = Counter(e.kind for e in audit)
    hooks = "1 hook" if len(audit) == 1 else f"{len(audit)} hooks"
    return f"{hooks} on {audit.model}: " + ", ".join(f"{kinds[k]} {k}" for k in KINDS if k in kinds)


def _places(entries: Iterable[HookEntry]) -> Iterator[str]:
    """The table by place; places with the same hooks share one."""
    at: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    for e in entries:
        at.setdefault((e.path, e.type), []).append((str(e.order), e.kind, e.name, e.owner, ", ".join(e.notes)))
    alike: dict[tuple[str, tuple[tuple[str, ...], ...]], list[tuple[str, str]]] = {}
    for place, rows in at.items():
        alike.setdefault(("tensors" if place[1] in _TENSORS else "modules", tuple(rows)), []).append(place)
    widths = [max(len(row[i]) for rows in at.values() for row in rows) for i in range(4)]
    for (what, shared), places in alike.items():
        yield _where(places, what)
        for row in shared:
            yield ("  " + "  ".join(f"{text:{width}}" for text, width in zip(row, [*widths, 0], strict=True))).rstrip()


def _where(places: list[tuple[str, str]], what: str) -> str:
    names = [path or "the model" for path, _ in places]
    types = f" ({', '.join(dict.fromkeys(t for _, t in places))})" if places[0][1] else ""
    return f"on {f'{len(names)} {what}: ' if len(names) > 1 else ''}{listed(names, _SHOWN)}{types}"


def _sentences(entries: Iterable[HookEntry]) -> Iterator[str]:
    """The effects of the hooks, each sentence once, with the hooks that have it."""
    found = _by_effect(entries)
    yield "effects (! may cause harm)" if any(effect.harms for effect, _ in found) else "effects"
    for effect, hooks in found:
        line = f"{'!' * effect.harms:1} {effect.on:10} {_subject(hooks)}: {effect.what}"
        yield textwrap.fill(line, _WIDTH, subsequent_indent=" " * 13)


def _by_effect(entries: Iterable[HookEntry]) -> list[tuple[Effect, list[HookEntry]]]:
    """Each effect with the hooks that have it, harmful ones first."""
    found: dict[Effect, list[HookEntry]] = {}
    for e in entries:
        for effect in e.effects:
            found.setdefault(effect, []).append(e)
    return sorted(found.items(), key=lambda item: not item[0].harms)


def _subject(hooks: list[HookEntry]) -> str:
    if len(hooks) == 1:
        return f"{hooks[0].kind} {hooks[0].name} on {hooks[0].path or 'the model'}"
    different = list(dict.fromkeys(f"{e.kind} {e.name}" for e in hooks))
    return f"{listed(different, _SHOWN)} ({len(hooks)} hooks)"
