"""The page's own scripts: modules as they stand, and one script when they are put together."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kedge.errors import SelectorError
from kedge.report.page import render
from kedge.sites.filters import SiteFilter
from kedge.sites.site import ALL_KINDS, OF_OPERATION, PARAM_KINDS, escape

ASSETS = Path(render.__file__).parent / "assets"
NAMES = re.compile(r"^(?:export )?(?:const|let|function|class|async function) (\w+)", re.MULTILINE)
EXPORTS = re.compile(r"^export (?:const|let|function|class|async function) (\w+)", re.MULTILINE)
IMPORTS = re.compile(r'^import \{([^}]*)\} from "\./(\w+\.js)";$', re.MULTILINE)


def source(name: str) -> str:
    """Read a script."""
    return (ASSETS / name).read_text(encoding="utf-8")


def test_every_asset_is_used() -> None:
    """What lies beside the page's code is in the page."""
    used = {
        *render.SCRIPTS,
        *render.STYLES,
        render.HEAD,
        render.LIBRARY,
        render.LICENCE,
        "page.html",
    }

    assert {path.name for path in ASSETS.iterdir()} == used


@pytest.mark.parametrize("name", render.SCRIPTS)
def test_a_script_is_short_and_imports_what_is_there(name: str) -> None:
    """A script is read in one sitting; it imports from scripts before it, what they export, and uses all of it."""
    text = source(name)
    before = render.SCRIPTS[: render.SCRIPTS.index(name)]
    body = IMPORTS.sub("", text)

    assert len(text.splitlines()) <= 400
    assert len(re.findall(r"^import ", text, re.MULTILINE)) == len(IMPORTS.findall(text))
    for wanted, other in IMPORTS.findall(text):
        assert other in before
        for word in wanted.split(","):
            assert word.strip() in EXPORTS.findall(source(other))
            assert re.search(rf"\b{word.strip()}\b", body), (
                f"{name} imports {word.strip()} and does not use it"
            )


def test_each_name_is_defined_once() -> None:
    """Put together, the scripts share one scope: no name is taken twice."""
    names = [name for script in render.SCRIPTS for name in NAMES.findall(source(script))]

    assert sorted(names) == sorted(set(names))


def test_what_is_exported_is_imported() -> None:
    """Nothing is exported for nobody."""
    exported = {name for script in render.SCRIPTS for name in EXPORTS.findall(source(script))}
    imported = {
        word.strip()
        for script in render.SCRIPTS
        for wanted, _ in IMPORTS.findall(source(script))
        for word in wanted.split(",")
    }

    assert exported == imported


def test_no_text_becomes_markup() -> None:
    """Names from a recording enter the page as text: no script parses markup."""
    for name in render.SCRIPTS:
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ):
            assert way not in source(name)


def test_crosses_are_whole(browser: Any) -> None:
    """The dashes of the line drawn before would leave gaps in them; and those that would touch are left out."""
    page = browser.new_page()
    page.goto("about:blank")
    made = page.evaluate(
        "() => {"
        + source("crosses.js").replace("export ", "")
        + """
      const done = [];
      const ctx = new Proxy({}, { get: (_, name) => (...given) => done.push([name, ...given]) });
      const plot = { ctx, bbox: { left: 0, width: 100 }, valToPos: (value) => value };
      drawCrosses(plot, [1, 2, 50, 200], 5, 3);
      return done;
    }"""
    )
    page.close()

    assert made.index(["setLineDash", []]) < made.index(["stroke"])
    assert [step[1] for step in made if step[0] == "moveTo"] == [-2, 4, 47, 53]


def test_put_together_they_end_no_element() -> None:
    """Scripts and styles have nothing in them that would end the element that holds them."""
    for text in (
        render.script(),
        (ASSETS / render.LIBRARY).read_text(encoding="utf-8"),
        render.stylesheet(),
    ):
        assert not re.search(r"</(script|style)|<!--", text, re.IGNORECASE)


@pytest.fixture(scope="module")
def chosen(browser: Any) -> Any:
    """The page's own filter, in a browser: the places of the sites that it chooses; None if it cannot be read."""
    page = browser.new_page()
    page.goto("about:blank")
    page.evaluate("() => {" + render.bundled(["filters.js"]) + "\nglobalThis.filterOf = filterOf;}")
    script = """([text, sites]) => {
      const filter = filterOf(text, { sites });
      if (filter.problem.startsWith("cannot read")) return null;
      return sites.flatMap((site, place) => filter.lets(site) ? [place] : []);
    }"""
    yield lambda text, sites: page.evaluate(script, [text, sites])
    page.close()


WORDS = st.text(alphabet="ab.*?é[]!{}#/:+\\\\, 1", min_size=1, max_size=8)
TEXTS = st.one_of(
    WORDS,
    st.sampled_from(
        [
            "a",
            "b.a",
            "**",
            "**.a",
            "*.b",
            "a.**",
            "**{A}",
            "**{B}, !a",
            "a:out",
            "b:param",
            "[ab]",
            "[!a].*",
            "/a",
            "/[ab]*#1",
            "/a:in[a]",
            "**, !/b:out",
            *(f"a:{kind}" for kind in ALL_KINDS),
        ]
    ),
)
PATHS = st.lists(st.text(alphabet="abé[+", min_size=1, max_size=2), max_size=3).map(".".join)
PLACES = st.builds(
    lambda path, kind, type_: {
        "site": f"{escape(path)}:{kind}",
        "path": path,
        "kind": kind,
        "type": type_,
        "owner": path.rpartition(".")[0] if kind in PARAM_KINDS else path,
    },
    PATHS,
    st.sampled_from([*ALL_KINDS, "out[a]"]),
    st.sampled_from("AB"),
)


OPERATIONS = st.builds(
    lambda op, side: {
        "site": f"/{op}:{side}",
        "path": f"/{op}",
        "kind": OF_OPERATION + side.partition("[")[0],
        "type": "",
        "owner": f"/{op}",
    },
    st.sampled_from(["a#0", "a#1", "b#1", "ab#0"]),
    st.sampled_from(["out", "in", "in[a]", "in.grad"]),
)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, places=st.lists(st.one_of(PLACES, OPERATIONS), min_size=1, max_size=5))
def test_a_filter_means_what_it_means_in_the_terminal(
    chosen: Any, text: str, places: list[dict[str, Any]]
) -> None:
    """The page's filter and ``kedge report --sites`` read the same texts, and choose the same sites."""
    assume(text.strip())
    assume("\\." not in text)  # no name of PyTorch's has a dot
    sites = [SimpleNamespace(**place) for place in places]
    try:
        wanted = SiteFilter(text, {path for site in sites for path in (site.path, site.owner)})
        expected = [place for place, site in enumerate(sites) if wanted.chooses(site)]
    except SelectorError:
        expected = None
    assert chosen(text, places) == expected
