"""The hooks that an audit found, with their owners and effects, as a table."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from kedge import notebook
from kedge.errors import WrongCall
from kedge.hooks.open_sessions import taps_on
from kedge.inspection.effects import (
    BACKWARD,
    FORWARD,
    STATE,
    TENSOR,
    CopyTrial,
    Effect,
    FoundHook,
    effects,
    function_in,
)
from kedge.inspection.owners import library_of, name_of, serves, source_of
from kedge.short_text import listed
from kedge.sites.folding import Folding

EVERY_OPTIMIZER = "every optimizer"
NODE = ("node-pre", "node-post")
KINDS = (
    "compiled",
    "replaced-forward",
    "parametrization",
    *FORWARD,
    *BACKWARD,
    *TENSOR,
    *NODE,
    *STATE,
    "replaced-step",
    "optimizer-step-pre",
    "optimizer-step",
    "registration",
)

_TENSORS = ("Parameter", "buffer", "parametrized")
_SHOWN = 3
_WIDTH = 118


@dataclass(frozen=True)
class HookEntry:
    """One hook that is on a model.

    Attributes:
        kind: One of `KINDS`.
        path: The first name of its module or tensor; "every module" or "every optimizer" for global
            hooks; for a node its name, and its number in the graph.
        type: Class name of that module, "Parameter" or "buffer", or the class of the audited
            object; empty for global hooks and nodes.
        order: Its place in the firing order among the hooks of its kind there, from 0. Global hooks
            come before a module's own.
        name: The name of the function.
        owner: "kedge", a library, or file and line of the program's own code.
        source: File and line of the code; empty if it has none.
        notes: How it was registered (with_kwargs, always_call), and the sites and actions that a
            Kedge hook serves.
        effects: Its effects on compile, gradients, in-place operations, pickle, deepcopy and
            state_dict.
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
        named = self.path or "the model"
        if self.type:
            named += f" ({self.type})"
        hook = f"{self.kind} {self.order} on {named}: {self.name}"
        return ", ".join((hook, self.owner, *self.notes))


@dataclass(frozen=True, repr=False)
class Audit(notebook.Printed):
    """The hooks that are on a model, in the model's order and in each place in firing order.

    Attributes:
        model: Class name of the model; the name of another audited object.
        entries: The hooks.
        what: The word for the audited object: model, tensor, node or optimizer.
        facts: What else is known of it, as labels and texts; nothing for a model.
        audited: Returns the model while it exists; None for another audited object.
    """

    model: str
    entries: tuple[HookEntry, ...]
    what: str = "model"
    facts: tuple[tuple[str, str], ...] = ()
    audited: Callable[[], nn.Module | None] | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return what can be pickled: all but the model."""
        return vars(self) | {"audited": None}

    def remove(self) -> int:
        """Remove the hooks that `kedge.hook` and `kedge.session` have left on the model without a block.

        Their handles need not be known: in a notebook, a cell that runs twice overwrites them.
        Hooks of a block, of `kedge.watch`, and of other libraries stay.

        Returns:
            The number of actions that were removed, each counted at every site.

        Raises:
            WrongCall: If something else than a model was audited.
        """
        if self.audited is None:
            raise WrongCall(
                f"this audit of {self.model} has no model, "
                "whose hooks could be removed: "
                "call kedge.audit(model).remove()"
            )
        model = self.audited()
        if model is None:
            return 0
        removed = 0
        for session, taps in taps_on(model):
            removed += len(taps)
            if len(taps) == len(session.taps):
                session.remove()
            else:
                session.drop(taps)
        return removed

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
        """A table by place, equal places in one, and below it the effects, harmful ones first."""
        parts = [[_headline(self)]]
        if self.facts:
            parts.append(list(_lines(self.facts)))
        if self.entries:
            parts.append(list(_places(self.entries)))
            parts.append(list(_sentences(self.entries)))
        return "\n\n".join("\n".join(part) for part in parts if part)

    def _repr_html_(self) -> str:
        facts = ""
        if self.facts:
            facts = notebook.table(("about", self.what), self.facts, align="lm")
        if not self.entries:
            return notebook.paragraph(_headline(self)) + facts

        columns = ("place", "type", "order", "kind", "name", "owner", "notes")
        folded = _FOLDING.shown(self.entries)
        hooks = [(one.name or "the model", *_cells(one.members[0])) for one in folded]
        html = notebook.table(columns, hooks, title=_headline(self), align="mmrlm")

        effects_ = _by_effect(self.entries)
        done = [(effect.on, _subject(hooks), effect.what) for effect, hooks in effects_]
        if done:
            html += notebook.table(("to", "hooks", "effects"), done, align="l")
        return html + facts


def _cells(entry: HookEntry) -> tuple[object, ...]:
    notes = ", ".join(entry.notes)
    return entry.type, entry.order, entry.kind, entry.name, entry.owner, notes


_FOLDING = Folding[HookEntry](lambda entry: entry.path, _cells)


def entry_of(found: FoundHook, trial: CopyTrial) -> HookEntry:
    """Return the entry of a hook."""
    function = function_in(found.hook)
    source = source_of(function)
    library = library_of(function)
    found = replace(found, ours=library == "kedge")
    if found.kind == "compiled":
        name = found.hook
        owner = "torch"
    else:
        name = name_of(found.hook)
        owner = library or source or "built in"

    notes = found.flags
    if found.ours:
        notes += serves(found.hook, found.path)
    return HookEntry(
        kind=found.kind,
        path=found.path,
        type=found.type,
        order=found.order,
        name=name,
        owner=owner,
        source=source,
        notes=notes,
        effects=effects(found, trial),
    )


def _headline(audit: Audit) -> str:
    if not audit.entries:
        return f"this {audit.what} has no hooks"
    count = Counter(entry.kind for entry in audit)
    kinds = [f"{count[kind]} {kind}" for kind in KINDS if kind in count]
    hooks = "1 hook" if len(audit) == 1 else f"{len(audit)} hooks"
    return f"{hooks} on {audit.model}: {', '.join(kinds)}"


def _lines(facts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """The facts, aligned, and long ones wrapped."""
    width = max((len(label) for label, _ in facts), default=0)
    indent = " " * (width + 2)
    for label, text in facts:
        yield textwrap.fill(f"{label:{width}}  {text}", _WIDTH, subsequent_indent=indent)


def _places(entries: Iterable[HookEntry]) -> Iterator[str]:
    """The table by place; places with the same hooks share one."""
    at: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    widths = [0, 0, 0, 0, 0]
    for e in entries:
        notes = ", ".join(e.notes)
        row: tuple[str, ...] = (str(e.order), e.kind, e.name, e.owner, notes)
        at.setdefault((e.path, e.type), []).append(row)
        widths = [max(width, len(text)) for width, text in zip(widths, row, strict=True)]

    alike: dict[tuple[str, tuple[tuple[str, ...], ...]], list[tuple[str, str]]] = {}
    for (path, type_), rows in at.items():
        what = "tensors" if type_ in _TENSORS else "modules"
        alike.setdefault((what, tuple(rows)), []).append((path, type_))

    for (what, shared), places in alike.items():
        yield _where(places, what)
        for row in shared:
            cells = [f"{text:{width}}" for text, width in zip(row, widths, strict=True)]
            yield f"  {'  '.join(cells)}".rstrip()


def _where(places: list[tuple[str, str]], what: str) -> str:
    names = [path or "the model" for path, _ in places]
    text = listed(names, _SHOWN)
    if len(names) > 1:
        text = f"{len(names)} {what}: {text}"

    types = list(dict.fromkeys(type_ for _, type_ in places))
    if types[0]:
        text += f" ({', '.join(types)})"
    return f"on {text}"


def _sentences(entries: Iterable[HookEntry]) -> Iterator[str]:
    """The effects of the hooks, each sentence once, with the hooks that have it."""
    found = _by_effect(entries)
    if not found:
        return
    if any(effect.harms for effect, _ in found):
        yield "effects (! may cause harm)"
    else:
        yield "effects"
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
        hook = hooks[0]
        return f"{hook.kind} {hook.name} on {hook.path or 'the model'}"
    different = list(dict.fromkeys(f"{e.kind} {e.name}" for e in hooks))
    return f"{listed(different, _SHOWN)} ({len(hooks)} hooks)"
