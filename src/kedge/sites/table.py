"""The sites of a model, as a printable table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from kedge import notebook
from kedge.sites.folding import Folding
from kedge.sites.select import ModelLayout, runs
from kedge.sites.site import MODULE_KINDS, PARAM_KINDS
from kedge.torch_internals.torchscript import class_name


@dataclass(frozen=True)
class SiteRow:
    """One module or parameter.

    Attributes:
        path: Its first name; empty for the model itself.
        type: Class name of the module; "Parameter" for a parameter.
        shape: Shape of a parameter; None for a module.
        kinds: The kinds of sites it has.
        also: Its other names, if it is registered under several.
        trainable: Whether a parameter requires grad; True for a module.
    """

    path: str
    type: str
    shape: tuple[int, ...] | None
    kinds: tuple[str, ...]
    also: tuple[str, ...] = ()
    trainable: bool = True


class Sites(notebook.Printed):
    """The modules that can be called and the parameters of a model, in the model's order."""

    def __init__(self, rows: tuple[SiteRow, ...]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[SiteRow]:
        """The rows."""
        return iter(self.rows)

    def __len__(self) -> int:
        """The number of modules and parameters."""
        return len(self.rows)

    def __getitem__(self, path: str) -> SiteRow:
        """The row of a path."""
        for row in self.rows:
            if path == row.path or path in row.also:
                return row
        raise KeyError(f'no module or parameter is called "{path}"')

    def __str__(self) -> str:
        """A table: path, type, and the kinds of sites there.

        In a long one, blocks that are alike share their lines.
        """
        return self.table()

    def table(self, *, folded: bool = True) -> str:
        """Return the table as text.

        Args:
            folded: Whether blocks that are alike share their lines in a long table.
        """
        lines = [("path", "type", "sites"), *self._lines(folded=folded)]
        path_width = max(len(path) for path, _, _ in lines)
        type_width = max(len(kind) for _, kind, _ in lines)
        texts = [
            f"{path:{path_width}}  {kind:{type_width}}  {sites}" for path, kind, sites in lines
        ]
        return "\n".join(text.rstrip() for text in texts)

    def _repr_html_(self) -> str:
        lines = self._lines(folded=True)
        return notebook.table(("path", "type", "sites"), lines, align="mmm")

    def _lines(self, *, folded: bool) -> list[tuple[str, str, str]]:
        folds = _FOLDING.shown(self.rows) if folded else _FOLDING.each(self.rows)
        lines = []
        for one in folds:
            row = one.members[0]
            lines.append((one.name or '""', _type(row), _kinds(row)))
        return lines


_FOLDING = Folding[SiteRow](
    lambda row: row.path,
    lambda row: (row.type, row.shape, row.kinds, row.also, row.trainable),
)


def _type(row: SiteRow) -> str:
    if row.shape is None:
        return row.type
    return f"{row.type}{list(row.shape)}"


def _kinds(row: SiteRow) -> str:
    text = " ".join(":" + kind for kind in row.kinds) or "none: TorchScript runs it"
    if not row.trainable:
        text += "  (requires no grad)"
    if row.also:
        text += f"  also {', '.join(row.also)}"
    return text


def sites_of(model: nn.Module) -> Sites:
    """Return the modules of a model that can be called, and its parameters; see `kedge.sites`."""
    layout = ModelLayout(model)
    rows: list[SiteRow] = []
    for name, module in layout.modules.items():
        if layout.first[id(module)] != name:
            continue
        if runs(module):
            also = _others(layout.modules, name)
            kinds = () if id(module) in layout.silent else MODULE_KINDS
            rows.append(SiteRow(name, class_name(module), None, kinds, also))
        rows += _params(layout, name)
    return Sites(tuple(rows))


def _params(layout: ModelLayout, owner: str) -> list[SiteRow]:
    rows = []
    for name, param in layout.params.items():
        if name.rpartition(".")[0] != owner or layout.first_param[id(param)] != name:
            continue
        shape = tuple(param.shape)
        trainable = param.requires_grad
        kinds: tuple[str, ...] = PARAM_KINDS if trainable else ("param",)
        if id(layout.owner(name)) in layout.silent:
            kinds = tuple(kind for kind in kinds if kind != "param")
        also = _others(layout.params, name)
        rows.append(SiteRow(name, "Parameter", shape, kinds, also, trainable))
    return rows


def _others(named: dict[str, Any], name: str) -> tuple[str, ...]:
    return tuple(n for n, thing in named.items() if thing is named[name] and n != name)
