"""The tensors that autograd held over a step: which, how large, and when; plain numbers.

# Note [Who bears a storage]
Several saved tensors may share a storage. Its bytes count once: for the first of those that are
held at a moment. If that one is released before the others, the next bears the storage from there
on. So a tensor has a span for each storage that it bears, and at each moment the bytes of the spans
add up to the bytes held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from kedge.json_input.shape import Check, Misshapen, count, fields, list_of, nullable, text

#: The most spans that are listed, the largest; the bytes of the others are added up.
MOST_SPANS = 5_000


@dataclass(frozen=True)
class TensorKind:
    """A description that alike saved tensors share.

    Attributes:
        path: The innermost module that was running; None outside of all.
        node: The autograd node that needs the tensors; None if unknown.
        field: The node's name for them.
        shape: Their shape.
        dtype: Their dtype.
        origin: The origin of their storage: an input of the model, made in the forward, or made
            again by a checkpoint.
        line: The file and line of the program; None if none was running.
    """

    path: str | None = None
    node: str | None = None
    field: str | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    origin: str = "made"
    line: str | None = None


class HeldSpan(NamedTuple):
    """Storages that tensors of one kind bear over the same moments.

    Attributes:
        kind: The number of the kind.
        storages: How many storages.
        bytes: Their bytes together.
        begin: The number of the first moment at which they are held.
        end: The number of the first moment at which they are not held any more.
    """

    kind: int
    storages: int
    bytes: int
    begin: int
    end: int


@dataclass(frozen=True)
class HeldTensors:
    """The tensors held over a step; see Note [Who bears a storage].

    Moments are numbered as the heights in `kedge.store.saved_account.BytesOverStep`.

    Attributes:
        kinds: The kinds of tensors, in the order in which they were first saved.
        spans: The spans, in the order in which they begin to count.
        rest: The bytes of spans that are not listed, at each moment; empty if all are listed.
    """

    kinds: tuple[TensorKind, ...] = ()
    spans: tuple[HeldSpan, ...] = ()
    rest: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.spans)

    def at(self, moment: int) -> Iterator[tuple[TensorKind, HeldSpan]]:
        """Yield the spans that are held at a moment, each with its kind."""
        for span in self.spans:
            if span.begin <= moment < span.end:
                yield self.kinds[span.kind], span

    def bytes(self, moment: int) -> int:
        """Return the bytes held at a moment."""
        listed = sum(span.bytes for _, span in self.at(moment))
        if not self.rest:
            return listed
        return listed + self.rest[moment]

    def to_json(self) -> dict[str, Any] | None:
        """Return the tensors as a recording stores them; None without any.

        It has each text once, and kinds as numbers of texts.
        """
        if not self:
            return None
        known: dict[str, dict[Any, int]] = {name: {} for name in _COLUMNS}
        kinds = []
        for kind in self.kinds:
            row = []
            for name, value in zip(_COLUMNS, astuple(kind), strict=True):
                numbers = known[name]
                row.append(numbers.setdefault(value, len(numbers)))
            kinds.append(row)
        texts = {name: list(values) for name, values in known.items()}
        texts["shape"] = [list(shape) for shape in texts["shape"]]
        return {
            **texts,
            "kinds": kinds,
            "spans": [list(span) for span in self.spans],
            "rest": list(self.rest),
        }

    @classmethod
    def from_json(cls, value: Any) -> HeldTensors:
        """Return the tensors of a recording; none if it has none.

        Raises:
            Misshapen: They are not as `to_json` returns them.
        """
        if value is None:
            return NO_TENSORS
        held = _check_entry(value)
        columns = [held[name] for name in _COLUMNS]
        kinds = []
        for row in held["kinds"]:
            try:
                texts = [column[at] for column, at in zip(columns, row, strict=True)]
            except (IndexError, ValueError):
                raise Misshapen("has a number without a text").within(".kinds") from None
            kinds.append(TensorKind(*texts))
        spans = tuple(map(HeldSpan._make, held["spans"]))
        return cls(tuple(kinds), spans, held["rest"])

    def check(self, moments: int) -> None:
        """Check that the spans are of known kinds, and lie within so many moments.

        Raises:
            Misshapen: They do not.
        """
        for span in self.spans:
            if span.kind >= len(self.kinds) or not span.begin < span.end <= moments:
                problem = f"has one without a kind, or outside of the {moments} moments"
                raise Misshapen(problem).within(".spans")
        if len(self.rest) not in (0, moments):
            raise Misshapen(f"has {len(self.rest)} sizes at {moments} moments").within(".rest")


NO_TENSORS = HeldTensors()

_NULLABLE_TEXTS = list_of(nullable(text))
#: The shape of the texts of each column of the kinds.
_COLUMNS: dict[str, Check] = {
    "path": _NULLABLE_TEXTS,
    "node": _NULLABLE_TEXTS,
    "field": _NULLABLE_TEXTS,
    "shape": list_of(list_of(count)),
    "dtype": list_of(text),
    "origin": list_of(text),
    "line": _NULLABLE_TEXTS,
}
_check_entry = fields(
    {
        **_COLUMNS,
        "kinds": list_of(list_of(count)),
        "spans": list_of(list_of(count, 5)),
        "rest": list_of(count),
    }
)


def limited(tensors: HeldTensors, moments: int, most: int = MOST_SPANS) -> HeldTensors:
    """Return at most so many spans, the largest.

    The bytes of the others are added up for each moment.
    """
    if len(tensors.spans) <= most:
        return tensors
    ordered = sorted(range(len(tensors.spans)), key=lambda place: -tensors.spans[place].bytes)
    kept = [tensors.spans[place] for place in sorted(ordered[:most])]
    changes = [0] * (moments + 1)
    for place in ordered[most:]:
        span = tensors.spans[place]
        changes[span.begin] += span.bytes
        changes[span.end] -= span.bytes
    numbers: dict[int, int] = {}
    spans = []
    for span in kept:
        number = numbers.setdefault(span.kind, len(numbers))
        spans.append(span._replace(kind=number))
    kinds = tuple(tensors.kinds[kind] for kind in numbers)
    return HeldTensors(kinds, tuple(spans), tuple(accumulate(changes[:-1])))
