"""Activation patching: the sites that carry the difference between two inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from kedge import notebook
from kedge.calls.arguments import called_as, described
from kedge.errors import InterventionError, WrongCall
from kedge.flow import Event
from kedge.hooks.session import session
from kedge.recipes.interventions.positions import mask
from kedge.recipes.model_run import (
    name_of,
    preserved_state,
    run,
    shortened,
    warn_of_training,
)
from kedge.sites import leaves
from kedge.sites.select import Selectors

Metric: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True)
class PatchRow:
    """The effect of one patch.

    Attributes:
        site: The site.
        position: The position; None for all at once.
        metric: The metric with the clean value there.
        effect: The share of the way from the corrupted to the clean metric: 0 nothing, 1 all.
    """

    site: str
    position: int | None
    metric: float
    effect: float

    @property
    def name(self) -> str:
        """The site, and the position if there is one."""
        if self.position is None:
            return self.site
        return f"{self.site} at {self.position}"


class Patching(notebook.Printed):
    """The effects of patches, as a table that prints; the result of `patch`.

    Attributes:
        clean: The metric of the clean input.
        corrupted: The metric of the corrupted input.
        rows: One for each patch, with the sites in the order of the forward.
    """

    def __init__(self, clean: float, corrupted: float, rows: tuple[PatchRow, ...]) -> None:
        self.clean = clean
        self.corrupted = corrupted
        self.rows = rows

    def __len__(self) -> int:
        """The number of patches."""
        return len(self.rows)

    def __iter__(self) -> Iterator[PatchRow]:
        """The rows."""
        return iter(self.rows)

    def __getitem__(self, site: str) -> Any:
        """The effect of a site; a list of effects if positions were patched one by one."""
        found = [row for row in self.rows if row.site in (site, f"{site}:out")]
        if not found:
            names = ", ".join(dict.fromkeys(row.site for row in self.rows))
            raise KeyError(f'"{site}" was not patched; there are {names}')
        if found[0].position is None:
            return found[0].effect
        return [row.effect for row in found]

    @property
    def effects(self) -> Tensor:
        """The effects by site and position: [sites, positions], or [sites] without positions.

        NaN where a site has fewer positions than others.
        """
        by_site: dict[str, list[float]] = {}
        for row in self.rows:
            by_site.setdefault(row.site, []).append(row.effect)
        width = max(map(len, by_site.values()))
        for effects in by_site.values():
            effects.extend([float("nan")] * (width - len(effects)))

        table = torch.tensor(list(by_site.values()), dtype=torch.float64)
        if self.rows[0].position is None:
            return table.squeeze(1)
        return table

    def _title(self) -> str:
        title = f"metric: clean {self.clean:.6g}, corrupted {self.corrupted:.6g}"
        if self.clean == self.corrupted:
            title += ": without a difference, there is no effect"
        return title

    def __str__(self) -> str:
        """One line a patch, under the metrics of the two inputs."""
        width = max(len(row.name) for row in self.rows)
        lines = [self._title()]
        lines += [f"{r.name:{width}}  {r.metric:12.6g}  {r.effect:8.1%}" for r in self.rows]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [(row.name, f"{row.metric:.6g}", f"{row.effect:.1%}") for row in self.rows]
        return notebook.table(("site", "metric", "effect"), rows, title=self._title(), align="mrr")


class _Values:
    """An action that keeps a copy of each value by its name, in the order of the forward."""

    observes = True

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def __call__(self, value: Tensor, event: Event) -> None:
        """Keep a value."""
        if value.is_floating_point():
            self.found[name_of(event)] = value.detach().clone()


class _Patch:
    """An action that replaces a value, or a position of it, by a kept one."""

    def __init__(self, kept: Tensor, position: int | None, dim: int) -> None:
        self.kept = kept
        self.position = position
        self.dim = dim

    def __repr__(self) -> str:
        """Its name in messages."""
        return "patch"

    def __call__(self, value: Tensor, event: Event) -> Tensor:
        """Return the value of the clean input."""
        if value.shape != self.kept.shape:
            raise InterventionError(
                f"{event.site} gives {leaves.describe(value)} for the corrupted input "
                f"and {leaves.describe(self.kept)} for the clean one; "
                "the two inputs must have the same shape"
            )
        if self.position is None:
            return self.kept.clone()  # which the program may work on in place
        return torch.where(mask(value, self.position, self.dim), self.kept, value)


@called_as('recipes.patch(model, clean, corrupted, "layer4", metric)')
def patch(
    model: nn.Module,
    clean: Any,
    corrupted: Any,
    sites: Selectors,
    metric: Metric,
    *,
    along: int | None = None,
) -> Patching:
    """Find out which sites carry the difference between two inputs (activation patching).

    The corrupted input runs once for each site, with the value that the clean input has at that
    site. If this brings the metric back to that of the clean input, the site carries the difference
    (Vig et al., 2020; Meng et al., "Locating and editing factual associations in GPT", 2022). The
    model runs without gradients, and is not changed.

    Args:
        model: The model, in the mode for the run: usually `eval`.
        clean: The clean input: a tensor, a tuple of arguments, or a dict of keyword arguments.
        corrupted: The corrupted input, of the same shapes.
        sites: A selector; each selected value, in each call of a module, is patched by itself.
        metric: A function of the model's output that returns one number, such as the difference of
            two logits.
        along: A dimension along which each position is patched by itself, such as 1 for the tokens
            of a sequence; None to patch each site as a whole.

    Returns:
        The table of effects, where 0 is no change, and 1 means that the metric is that of the clean
        input.

    Examples:
        >>> table = recipes.patch(model, images[:1], images[1:2], "relu, fc", lambda output: output[0, 0])
        >>> table["fc"]
        1.0
    """
    if not callable(metric):
        raise WrongCall(
            f"patch(metric={described(metric)}): metric is a function from the model's output to one "
            "number, such as lambda output: output[0, 3]"
        )
    warn_of_training(model)
    values = _Values()
    ledger, whole = _run(model, clean, metric, sites, values)
    if not values.found:
        raise InterventionError(f'no floating-point value was seen at "{sites}": {ledger}')
    _, broken = _run(model, corrupted, metric)

    rows = []
    sites_shown = shortened(values.found)
    for site, (name, kept) in zip(sites_shown, values.found.items(), strict=True):
        for position in _positions(name, kept, along):
            patched = _Patch(kept, position, along or 0)
            _, reached = _run(model, corrupted, metric, name, patched)
            effect = float("nan")
            if whole != broken:
                effect = (reached - broken) / (whole - broken)
            rows.append(PatchRow(site, position, reached, effect))
    return Patching(whole, broken, tuple(rows))


def _run(model: nn.Module, given: Any, metric: Metric, *hook: Any) -> tuple[str, float]:
    """Return the ledger of a hook and the metric of a model's run with it, or without a hook."""
    ledger = ""
    with preserved_state(model), torch.no_grad(), session() as s:
        if not hook:
            number = metric(run(model, given))
            s.end(quiet=True)
        else:
            where, action = hook
            hooked = s.hook(model, where, action)
            number = metric(run(model, given))
            ledger = str(hooked.ledger())
            fired = any(entry.fired for entry in hooked.ledger())
            if isinstance(action, _Patch) and not fired:
                raise InterventionError(
                    f"{where} has a value for the clean input, "
                    f"but none for the corrupted one: {ledger}"
                )
            # Without values an error follows.
            s.end(quiet=not isinstance(action, _Values) or not action.found)

    if isinstance(number, Tensor) and number.numel() != 1:
        raise InterventionError(
            f"the metric returned {leaves.describe(number)}; it must return one number"
        )
    try:
        return ledger, float(number)
    except (TypeError, ValueError) as error:
        raise InterventionError(
            f"the metric returned {number!r}; it must return one real number"
        ) from error


def _positions(name: str, kept: Tensor, along: int | None) -> list[int] | list[None]:
    if along is None:
        return [None]
    if not -kept.dim() <= along < kept.dim() or not kept.shape[along]:
        raise InterventionError(
            f"{name} gave {leaves.describe(kept)}, "
            f"which has no dimension {along} to patch along, or nothing in it"
        )
    return list(range(kept.shape[along]))
