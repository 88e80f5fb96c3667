"""What autograd held for backward, added up: by module, by line of the program, over the time; plain numbers.

# Note [What a remedy frees]
Of what one module holds, a storage counted once, for whoever saved it first:

- *rebuild*: the bytes of what can be computed again from something else that is held anyhow, less what has to be kept
  for that, such as one bit an element of a dropout mask.
- *offload*: the bytes of plain strided tensors, in storages from a least size on, that are no parameters, buffers or
  inputs of the model.
- *bf16*, *int8*: of those that are floating point, what a number of 2 bytes leaves over, or one of 1 byte and a scale of 4
  for every 256 of them.
- *checkpoint*: the bytes that only calls of the module and of the modules in it hold, less what they were given: a
  checkpoint keeps that, also where nobody else would have. While its backward runs it needs the rest again.

A model's own inputs count with what is held, and no remedy frees them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from kedge.numbers import sized

MOST_ROWS = 24
_LONGEST = 44
_BY_MODULE = ("module", "tensors", "packed", "held", "rebuild", "offload", "bf16", "int8", "checkpoint")
WORDS = "what it says"
_BY_LINE = ("line", "tensors", "packed", "held", "rebuild", WORDS)
_NOTE = (
    "packed: as often as saved. held: each storage once, for whoever saved it first. rebuild to checkpoint: what each would "
    "free. A module's figures are with those of the modules in it."
)


@dataclass(frozen=True)
class Sums:
    """What some saved tensors come to; see Note [What a remedy frees].

    Attributes:
        path: The module; None for what was saved outside of all.
        tensors: How often something was saved that is still held.
        packed: The bytes of all these tensors, as often as each was saved.
        bytes: The bytes of their storages, each once, without parameters and buffers.
        rebuild: What rebuilding frees.
        offload: What offloading frees.
        bf16: What keeping floats in bfloat16 frees.
        int8: What keeping floats in 8 bits frees.
        checkpoint: What checkpointing the module frees; 0 where there is no such module.
    """

    path: str | None = None
    tensors: int = 0
    packed: int = 0
    bytes: int = 0
    rebuild: int = 0
    offload: int = 0
    bf16: int = 0
    int8: int = 0
    checkpoint: int = 0


@dataclass(frozen=True)
class LineSums:
    """What one line of the program saved.

    Attributes:
        file: The file; None where no line of the program was running.
        line: Its number.
        function: The function that it is in.
        text: What it says, if it can be read.
        tensors: How often something was saved that is still held.
        packed: The bytes of all these tensors.
        bytes: The bytes of their storages, each once, without parameters and buffers.
        rebuild: What rebuilding frees.
    """

    file: str | None = None
    line: int = 0
    function: str = ""
    text: str | None = None
    tensors: int = 0
    packed: int = 0
    bytes: int = 0
    rebuild: int = 0

    @property
    def place(self) -> str:
        """File and line, short."""
        return f"{self.file}:{self.line}" if self.file is not None else "(no line of the program)"


@dataclass(frozen=True)
class Course:
    """Bytes held over a step.

    Attributes:
        bytes: What is held after each save and each release; thinned out where there were very many.
        at: Which save or release each belongs to, counted from 1 on.
        peak: The largest of all.
        peak_at: After which save or release it was reached.
        backward: The first release, where the backward pass begins to give back; None if there was none.
        holders: Who holds how much at the peak: paths and bytes, the largest first.
    """

    bytes: tuple[int, ...] = ()
    at: tuple[int, ...] = ()
    peak: int = 0
    peak_at: int = 0
    backward: int | None = None
    holders: tuple[tuple[str | None, int], ...] = ()


@dataclass(frozen=True)
class Account:
    """What autograd held at one moment, or at the peak of one step.

    Attributes:
        total: All together; its `checkpoint` is not used.
        parameters: Bytes of parameters and buffers among what was saved; they are there anyhow, and `total` is without them.
        inputs: Bytes of the model's inputs among `total`.
        modules: What each module holds by itself, in the order of the data.
        tree: What each module holds with all modules in it.
        lines: The same by line, the largest first.
        items: The largest saved tensors, described.
        course: The bytes over the time.
    """

    total: Sums
    parameters: int
    inputs: int
    modules: tuple[Sums, ...]
    tree: tuple[Sums, ...]
    lines: tuple[LineSums, ...]
    items: tuple[Mapping[str, Any], ...]
    course: Course

    def entry(self) -> dict[str, Any]:
        """Describe it as a recording does; see docs/recording.md."""
        return {
            "bytes": self.total.bytes,
            "modules": [_brief(sums) for sums in self.modules],
            "total": _brief(self.total) | {"parameters": self.parameters, "inputs": self.inputs},
            "tree": [_brief(sums) for sums in self.tree],
            "lines": [asdict(sums) for sums in self.lines],
            "items": list(self.items),
            "course": asdict(self.course),
        }


def newest(events: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Choose the newest event about what autograd saved; one that was asked for goes before one that was not."""
    found = [event for event in events if event.get("kind") == "saved"]
    full = [event for event in found if "total" in event]
    own = [event for event in full if not event.get("rank")]
    return next(reversed(own or full or found), None)


def _brief(sums: Sums) -> dict[str, Any]:
    """Write sums without what is zero."""
    return {key: value for key, value in asdict(sums).items() if value or key in ("path", "tensors", "bytes")}


def account_of(event: Mapping[str, Any]) -> Account | None:
    """Read an account from an event of a recording; None if the event has the bytes of modules alone."""
    if "total" not in event:
        return None
    total, course = event["total"], dict(event.get("course", {}))
    for name in ("bytes", "at"):
        course[name] = tuple(course.get(name, ()))
    course["holders"] = tuple((path, size) for path, size in course.get("holders", ()))
    return Account(
        total=_read(Sums, total),
        parameters=total.get("parameters", 0),
        inputs=total.get("inputs", 0),
        modules=tuple(_read(Sums, each) for each in event.get("modules", ())),
        tree=tuple(_read(Sums, each) for each in event.get("tree", ())),
        lines=tuple(_read(LineSums, each) for each in event.get("lines", ())),
        items=tuple(event.get("items", ())),
        course=_read(Course, course),
    )


def _read(kind: Any, entry: Mapping[str, Any]) -> Any:
    """Make one of ours of what has its attributes, and perhaps others of a newer version."""
    return kind(**{field.name: entry[field.name] for field in fields(kind) if field.name in entry})


# -- as tables -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """A table in words, for whoever draws it.

    Attributes:
        title: What it is about.
        columns: The names of the columns; the first is words, the others are figures.
        rows: The cells.
        note: What to say below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def sections(account: Account, most: int | None = MOST_ROWS) -> Iterator[Section]:
    """Make the tables of an account.

    Args:
        account: What was held.
        most: At most how many modules and lines, the largest ones; None for all.
    """
    yield Section("", ("saved for backward", ""), tuple(_totals(account)))
    chosen, left = _largest(account.tree, most)
    yield Section("by module", _BY_MODULE, tuple(map(_row, chosen)), _NOTE + _rest(left, "module"))
    chosen, left = _largest(account.lines, most)
    yield Section("by line", _BY_LINE, tuple(map(_line, chosen)), _rest(left, "line").strip())


def _totals(account: Account) -> Iterator[tuple[str, str]]:
    total, course = account.total, account.course
    yield f"packed ({total.tensors:,} tensors, as often as saved)", sized(total.packed)
    yield "held (each storage once, no parameters)", sized(total.bytes)
    yield "inputs of the model among that", sized(account.inputs)
    yield "can be rebuilt exactly", sized(total.rebuild)
    yield "can be moved", sized(total.offload)
    yield "freed by floats in bf16", sized(total.bf16)
    yield "freed by floats in int8", sized(total.int8)
    yield "parameters and buffers saved, there anyhow", sized(account.parameters)
    if course.peak:
        yield "largest holder at the peak", named(course.holders[0][0]) if course.holders else "-"
        yield f"peak (after {course.peak_at:,} of {course.at[-1]:,} saves and releases)", sized(course.peak)


def _row(sums: Sums) -> tuple[str, ...]:
    freed = (sums.rebuild, sums.offload, sums.bf16, sums.int8, sums.checkpoint)
    figures = (sized(sums.packed), sized(sums.bytes), *(sized(size) if size else "-" for size in freed))
    return (named(sums.path), f"{sums.tensors:,}", *figures)


def _line(sums: LineSums) -> tuple[str, ...]:
    text = sums.text or ""
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    figures = (sized(sums.packed), sized(sums.bytes), sized(sums.rebuild) if sums.rebuild else "-")
    return (sums.place, f"{sums.tensors:,}", *figures, text)


def _largest(rows: Sequence[Any], most: int | None) -> tuple[list[Any], int]:
    """Choose the rows that hold most, in the order that they have, and count the others."""
    held = [row for row in rows if row.bytes or row.packed]
    if most is None or len(held) <= most:
        return held, 0
    least = sorted((row.bytes for row in held), reverse=True)[most - 1]
    chosen = [row for row in held if row.bytes >= least][:most]
    return chosen, len(held) - len(chosen)


def _rest(left: int, noun: str) -> str:
    return f" {left:,} smaller {noun}{'s' if left != 1 else ''} left out." if left else ""


def named(path: str | None) -> str:
    """Name a module in a table."""
    return "(outside of modules)" if path is None else path or "(the model)"
