"""The stages of a pipeline, read as one model."""

from __future__ import annotations

from typing import Any

from kedge.store.reading.ranks import RankShare, assemble
from kedge.store.recording import Recording
from kedge.store.sites import Root, root_from


def root(*paths: str) -> Root:
    """Return a root with some modules, of one parameter each."""
    modules = [{"path": path, "type": "Linear"} for path in ("", *paths)]
    return root_from({"name": "Net", "prefix": "", "parameters": len(paths), "modules": modules})


def share(rank: int, *layers: str) -> RankShare:
    """Return the recording of a rank whose root calls some layers, with as many elements as its number."""
    texts = [":in", *(f"{layer}:{kind}" for layer in layers for kind in ("in", "out")), ":out"]
    sites: list[dict[str, Any]] = [
        {"site": text, "from": [None] if text.endswith(":in") else []} for text in texts
    ]
    rows = [{"site": text, "step": 0, "level": 2, "count": rank + 1, "calls": 1} for text in texts]
    built = Recording.build(sites, rows)
    return RankShare(rank, (root(*layers),), built.sites, (), built.table)


def test_stages_become_one_root() -> None:
    """With the modules of all, each once, also if two ranks have the same stage."""
    roots, sites, _ = assemble([share(0, "a"), share(1, "a"), share(2, "b"), share(3, "b")])

    assert [(r.parameters, [m["path"] for m in r.modules]) for r in roots] == [(2, ["", "a", "b"])]
    assert [s.site for s in sites] == [":in", "a:in", "a:out", "b:in", "b:out", ":out"]


def test_the_model_has_the_input_of_the_first_stage_and_the_output_of_the_last() -> None:
    """What is handed on between stages is the input of a module there, made by the last module of the stage before."""
    _, sites, table = assemble([share(0, "a"), share(1, "b"), share(2, "c")])
    numbers = {site.site: site.id for site in sites}

    assert table.rows(numbers[":in"]).count.tolist() == [1]
    assert table.rows(numbers[":out"]).count.tolist() == [3]
    assert {site.site: site.sources for site in sites if site.kind == "in"} == {
        ":in": (None,), "a:in": (None,), "b:in": (numbers["a:out"],), "c:in": (numbers["b:out"],)
    }  # fmt: skip


def test_ranks_with_the_same_modules_are_no_stages() -> None:
    """Nor is a rank that calls some of them only."""
    for shares in (
        [share(0, "a", "b"), share(1, "a", "b")],
        [share(0, "a", "b", "c"), share(1, "a", "b")],
    ):
        _, sites, table = assemble(shares)
        assert table.rows(next(s.id for s in sites if s.site == ":in")).count.tolist() == [3]
