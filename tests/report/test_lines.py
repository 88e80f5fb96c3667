"""Which lines the table has."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kedge.errors import NoSuchSite
from kedge.report.module_lines import lines, matching
from kedge.store.recording import Recording

TYPES = {"mlp": "Linear"}
PATHS = ["embed", "h.0.attn.q", "h.0.attn", "h.0.mlp", "h.0", "h.10.mlp", "h.10", ""]


def labels(sites: list[Any], roots: list[Any] | None = None) -> list[str]:
    """Name the lines of a recording with these sites."""
    return [line.label for line in lines(Recording.build(sites, roots=roots or []))]


def test_lines_are_in_the_order_of_the_data() -> None:
    """A line stands where its output first came, not its gradient or parameters."""
    assert labels(
        ["a:out.grad", "b:out", {"site": "c.weight:param", "owner": "c"}, "c:out", "a:out"]
    ) == [
        "b",
        "c",
        "a",
    ]


def test_a_name_that_a_selector_escapes_stands_once() -> None:
    """It is escaped as in the site's text, which a finding names and a filter takes."""
    sites = [{"site": r"a\ b:out", "path": "a b"}, {"site": r"a\ b#1:out[x]", "path": "a b"}]

    assert labels(sites) == [r"a\ b", r"a\ b#1[x]"]


def test_a_line_gathers_the_sites_of_its_module() -> None:
    """Output, gradient and own parameters are one line; its size counts each parameter once."""
    sites = [
        {"site": "fc:out", "type": "Linear", "shape": [8, 4]},
        {"site": "fc:out.grad"},
        *({"site": f"fc.{name}:{kind}", "owner": "fc", "shape": shape}
          for kind in ("param.grad", "param", "update")
          for name, shape in (("bias", [4]), ("weight", [4, 3]))),
    ]  # fmt: skip

    (line,) = lines(Recording.build(sites))

    assert (line.label, line.type, line.shape, line.size) == ("fc", "Linear", "8x4", 16)
    assert line.texts == {site["site"] for site in sites}
    assert [site.path for site in line.parameters["update"]] == ["fc.weight", "fc.bias"]


def test_calls_and_leaves_have_lines_of_their_own() -> None:
    """Several calls of one module and several leaves of one output are told apart."""
    sites = [
        {"site": "encoder#0:out", "path": "encoder", "kind": "out"},
        {"site": "encoder#1:out", "path": "encoder", "kind": "out"},
        {"site": "attn:out[0]", "path": "attn", "kind": "out[0]"},
        {"site": "attn:out[1]", "path": "attn", "kind": "out[1]"},
        {"site": "attn:out.grad[1]", "path": "attn", "kind": "out.grad[1]"},
    ]

    made = {line.label: sorted(line.sites) for line in lines(Recording.build(sites))}

    assert made == {
        "encoder#0": ["out"],
        "encoder#1": ["out"],
        "attn[0]": ["out"],
        "attn[1]": ["out", "out.grad"],
    }


def test_a_root_is_called_by_its_class() -> None:
    """The model itself has no path; its line has its name in brackets."""
    assert labels([":out"], [{"name": "Net"}]) == ["(Net)"]
    assert labels([":out"]) == ["(root)"]


def test_what_has_no_output_stands_where_the_data_would_pass() -> None:
    """A module that is bypassed but owns parameters stands before the nearest module that holds it."""
    bypassed = [
        {"site": f"{owner}.weight:param", "owner": owner}
        for owner in ("h.1.attn.proj", "h.0.attn.proj", "x")
    ]
    flow = ["h.0.attn:out", "h.0:out", "h.1.attn:out", "h.1:out", "h.10:out"]

    assert labels([*bypassed, *flow]) == [
        "h.0.attn.proj",
        "h.0.attn",
        "h.0",
        "h.1.attn.proj",
        "h.1.attn",
        "h.1",
        "h.10",
        "x",
    ]


def test_parameters_alone_have_lines() -> None:
    """Where no output was watched, the modules that own parameters are listed."""
    assert labels(
        [
            {"site": "fc.weight:param.grad", "owner": "fc"},
            {"site": "fc.weight:param", "owner": "fc"},
        ]
    ) == ["fc"]


@pytest.mark.parametrize(
    ("glob", "chosen"),
    [
        ("embed", ["embed"]),
        ("embed:out", ["embed"]),
        ("h.*", ["h.0", "h.10"]),
        ("h.?", ["h.0"]),
        ("h.*.mlp", ["h.0.mlp", "h.10.mlp"]),
        ("h.0.**", ["h.0.attn.q", "h.0.attn", "h.0.mlp", "h.0"]),
        ("**.mlp", ["h.0.mlp", "h.10.mlp"]),
        ("**.q", ["h.0.attn.q"]),
        ("h.**.q", ["h.0.attn.q"]),
        ("**", PATHS),
        ("embed, h.1*", ["embed", "h.10"]),
        ("mlp", ["h.0.mlp", "h.10.mlp"]),
        ("at", ["h.0.attn"]),
        ("0.ml", ["h.0.mlp"]),
        ("h.**, !mlp", ["h.0.attn.q", "h.0.attn", "h.0", "h.10"]),
        (":out", [""]),
        ("**{Linear}", ["h.0.mlp", "h.10.mlp"]),
    ],
)
def test_lines_can_be_chosen_by_path(glob: str, chosen: list[str]) -> None:
    """``*`` stays within a segment, ``**`` crosses any number of them, none included."""
    known = lines(
        Recording.build(
            [{"site": f"{path}:out", "type": TYPES.get(path[-3:], "Net")} for path in PATHS]
        )
    )

    assert [line.path for line in matching(known, glob)] == chosen


@pytest.mark.parametrize(
    ("glob", "message"),
    [
        (
            "h.0.mpl",
            '"h.0.mpl" selects nothing in this recording; the nearest are "h.0.mlp", "h.0"',
        ),
        ("*.attn", '"*.attn" selects nothing in this recording; the nearest are "**.attn"'),
        ("h.0-10.mlp", '"h.0-10.mlp" selects nothing in this recording; the nearest are "h.*.mlp"'),
        ("0-10.mlp", '"0-10.mlp" selects nothing in this recording; the nearest are "**.*.mlp"'),
        ("atn", '"atn" selects nothing in this recording; the nearest are "attn"'),
        ("embed, mpl", '"mpl" selects nothing in this recording; the nearest are "mlp"'),
        ("zzz", '"zzz" selects nothing in this recording; "**" selects everything'),
    ],
)
def test_a_choice_of_nothing_is_an_error(glob: str, message: str) -> None:
    """What matches no path is answered with the nearest ones."""
    known = lines(Recording.build([f"{path}:out" for path in PATHS]))

    with pytest.raises(NoSuchSite, match=re.escape(message)):
        matching(known, glob)
