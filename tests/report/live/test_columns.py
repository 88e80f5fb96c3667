"""The columns of the live table fit the terminal."""

from __future__ import annotations

import pytest

from kedge.report.live.module_list import ModuleList
from kedge.report.module_lines import folded, lines
from kedge.store.recording import Recording

KINDS = ("out", "out.grad", "param", "update")


def tower(*, broken: bool = False) -> ModuleList:
    """Return the list of blocks with long names, whose figures are spread over many orders of magnitude."""
    paths = [f"model.decoder.layers.{i}.self_attn.q_proj" for i in range(48)]
    places, rows = [], []
    for i, path in enumerate(paths):
        for kind in KINDS:
            path_there = path if kind.startswith("out") else f"{path}.weight"
            site = f"{path_there}:{kind}"
            places.append(
                {
                    "site": site,
                    "path": path_there,
                    "kind": kind,
                    "owner": path,
                    "type": "Linear",
                    "shape": [8],
                }
            )
            scale = (1.0 + i / 48) * (1e-4 if kind == "update" else 1.0)
            rows.append(
                {"site": site, "step": 0, "count": 8, "sumsq": 8 * (scale / 1e4) ** 2, "level": 2}
            )
    if broken:
        rows[0] |= {"sumsq": float("nan"), "nonfinite": 1}
    made = ModuleList()
    made.fill(folded(lines(Recording.build(places, rows))), {})
    return made


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("width", [24, 40, 60, 72, 80, 100, 120, 200])
def test_every_column_is_whole(width: int, broken: bool) -> None:
    """No line is wider than the terminal, and of columns without room none is shown in part."""
    made = tower(broken=broken)
    made.lay_out(width)
    titles, first = made.header().plain, made.drawn(len(made.shown) - 1).plain

    assert len(titles) <= width
    assert len(first) == len(titles)
    assert ".q_proj" in first or "…q_proj" in first
    assert ("✗" in titles) >= (broken and width >= 40)
    assert ("update" in titles) == (width >= 80)
    assert ("type" in titles) == (width >= 120)


def test_a_name_is_cut_in_its_middle() -> None:
    """The numbers of the blocks and the last name stay."""
    made = tower()
    made.lay_out(80)

    assert made.drawn(0).plain.split()[1] == "mode…0-47…q_proj"
