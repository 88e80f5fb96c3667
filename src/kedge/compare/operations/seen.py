"""What a second run of a program has seen of the operations of one step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from kedge.shown_text import visible

#: An operation, the inputs of a module's call, its outputs, or what a backward pass begins at.
Event = Literal["operation", "in", "out", "backward"]


@dataclass(frozen=True)
class SeenValue:
    """A tensor that went into an operation or came out of it.

    Attributes:
        name: Its name among the arguments or results; empty for a bare result.
        dtype: Its dtype, such as ``float32``.
        shape: Its shape.
        digest: The digest of its dtype, shape and bits.
        node: The name of its autograd node; ``leaf`` for one that needs a gradient and has no node,
            empty for one that needs none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    node: str


@dataclass(frozen=True)
class SeenOperation:
    """An operation of a step, or a boundary of a module's call.

    Attributes:
        event: What it is.
        name: The operation's name; empty for a boundary.
        module: The path of the innermost module that runs, or of the module that is called, as the
            recording has it; the type in brackets of one that it has not; empty outside of modules.
        file: The file of the program's line, relative to the program's folder if it is inside.
        line: The line's number; 0 if none is known.
        text: The line.
        inputs: The tensors that it gets.
        arguments: Its other arguments, as text, by name.
        outputs: The tensors that it returns or changes; none of a boundary.
        random: The digest of the states of all random generators before it, if it has drawn from
            one; empty otherwise.
        enters: Whether it takes its numbers from outside of PyTorch, as ``torch.tensor`` does.
    """

    event: Event
    name: str
    module: str
    file: str
    line: int
    text: str
    inputs: tuple[SeenValue, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[SeenValue, ...] = ()
    random: str = ""
    enters: bool = False

    @property
    def place(self) -> str:
        """Its line: ``model.py:41``; empty if none is known."""
        if not self.line:
            return ""
        return f"{self.file}:{self.line}"

    @property
    def plain_name(self) -> str:
        """Its name without the mark of an operation in place."""
        return self.name.removesuffix("_")

    @cached_property
    def given(self) -> tuple[str, ...]:
        """The digests of the tensors that it gets."""
        return tuple(value.digest for value in self.inputs)

    @cached_property
    def taken(self) -> tuple[str, ...]:
        """The digests of what it gets, and that of the random generators if it draws."""
        if not self.random:
            return self.given
        return *self.given, self.random

    @cached_property
    def made(self) -> tuple[str, ...]:
        """The digests of its results."""
        return tuple(value.digest for value in self.outputs)


@dataclass(frozen=True)
class SeenStep:
    """What a second run has seen of one step.

    Attributes:
        operations: The operations and boundaries, in the order in which they ended.
        written: Files that the program has written up to its end.
        failure: The reason why the step was not seen to its end; empty if it was.
    """

    operations: tuple[SeenOperation, ...]
    written: tuple[str, ...]
    failure: str

    def entry(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @classmethod
    def of_entry(cls, entry: Mapping[str, Any]) -> SeenStep:
        """Return what `entry` has made JSON values of."""
        operations = []
        for each in entry["operations"]:
            values = {name: _values(each[name]) for name in ("inputs", "outputs")}
            text = visible(each["text"])
            operations.append(SeenOperation(**{**each, **values, "text": text}))
        return cls(tuple(operations), tuple(entry["written"]), entry["failure"])


def _values(entries: Iterable[Mapping[str, Any]]) -> tuple[SeenValue, ...]:
    return tuple(SeenValue(**{**entry, "shape": tuple(entry["shape"])}) for entry in entries)
