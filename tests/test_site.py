"""The site of the docs: what its hooks make of the pages, and how some of them are in a browser.

`make site` builds all of it, strictly: a page outside of the navigation, a dead link and an unknown
name fail there.
"""

from __future__ import annotations

import functools
import http.server
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import kedge
from kedge.rules import ALL
from tests.chromium import launched
from tests.report.page.conftest import LAPTOP, Watched
from tests.report.page.test_accessible import FITS, violations

ROOT = Path(__file__).parents[1]
HOME, GUIDE, GLOSSARY, API = (
    "index.md",
    "how-to/hooks.md",
    "reference/glossary.md",
    "reference/api/actions.md",
)
BUILD = """
import sys
from mkdocs.commands.build import build
from mkdocs.config import load_config

settings, docs, site, *pages = sys.argv[1:]
build(load_config(settings, docs_dir=docs, site_dir=site, nav=pages, watch=[], quiet=True))
"""
PUBLIC = (
    "kedge.features.dataset",
    "kedge.features.reduce",
    "kedge.figures",
    "kedge.figures.graph",
    "kedge.recipes",
    "kedge.rules",
)
"""The packages besides `kedge` whose names are public: those that they list."""


def hook(name):
    """Return a hook of the site."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/site/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def at(path):
    """Return the object of a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@functools.cache
def entries():
    """Return the paths that the API pages show, each with its page."""
    pages = sorted((ROOT / "docs/reference/api").glob("*.md"))
    return [
        (path, page.name)
        for page in pages
        for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]


def test_every_public_name_is_on_one_api_page():
    """None is forgotten, and none is explained twice, under whichever of its names."""
    elsewhere = (
        "kedge.errors",
        "kedge.integrations.",
    )  # as a whole; of packages that are slow to import
    shown = [at(path) for path, _ in entries() if not path.startswith(elsewhere)]
    public = {
        name: at(f"kedge.{home}.{name}") for home, names in kedge._HOME.items() for name in names
    }
    public |= {
        f"{home}.{name}": at(f"{home}.{name}")
        for home in PUBLIC
        for name in importlib.import_module(home).__all__
    }
    testing = importlib.import_module("kedge.testing")
    public |= {
        f"kedge.testing.{name}": found
        for name, found in vars(testing).items()
        if inspect.isfunction(found)
        and found.__module__ == testing.__name__
        and not name.startswith("_")
    }
    errors = {
        name for name, found in public.items() if getattr(found, "__module__", "") == "kedge.errors"
    }

    missing = [
        name
        for name, found in public.items()
        if name not in errors and not any(found is one for one in shown)
    ]
    assert missing == []
    assert len({id(one) for one in shown}) == len(shown)
    assert ("kedge.errors", "errors.md") in entries()


def test_the_navigation_has_every_rule_in_the_order_of_the_index():
    """Where it names their folder; other entries stay."""
    pages = hook("rule_pages").pages()
    config = SimpleNamespace(nav=[{"Rules": ["a.md", {"Each": "reference/rules/"}]}])

    assert [code for page in pages for code in page] == [*(rule.code for rule in ALL), "DEPARTS"]
    assert hook("rule_pages").on_config(config).nav == [{"Rules": ["a.md", {"Each": pages}]}]
    assert all((ROOT / "docs" / path).is_file() for page in pages for path in page.values())


def test_every_integration_is_on_an_api_page():
    """A new file in integrations/ gets its entry."""
    files = {found.name for found in pkgutil.iter_modules([ROOT / "src/kedge/integrations"])} - {
        "callback"
    }
    shown = {path.split(".")[2] for path, _ in entries() if path.startswith("kedge.integrations.")}

    assert files == shown


def test_links_lead_to_pages_or_to_the_repository():
    """A link is written as GitHub wants it; the site has pages of its own for some files, and addresses for others."""
    site = hook("sources")
    text = "[a](../../benchmarks/RESULTS.md#x) [b](../../src/kedge/flow.py) [c](page.md) [d](../../README.md) [e](#here)"

    assert site.for_site(text, "how-to/hooks.md") == (
        f"[a](../explanation/measurements.md#x) [b]({site.repository()}/blob/main/src/kedge/flow.py) [c](page.md) "
        "[d](../index.md) [e](#here)"
    )
    assert (
        site.for_site("[a](docs/how-to/nan.md)", "explanation/contributing.md")
        == "[a](../how-to/nan.md)"
    )
    assert site.address("../../src/kedge/hooks", "how-to/hooks.md").endswith(
        "/tree/main/src/kedge/hooks"
    )
    assert (
        site.address("../tutorial/notebook.ipynb", "how-to/hooks.md") == "../tutorial/notebook.md"
    )
    assert site.address("../../src/gone.py", "how-to/hooks.md") == "../../src/gone.py"


def test_comments_are_left_out_but_not_in_code():
    """`<!-- not run: why -->` is for the tests; what a page shows of HTML stays."""
    text = "<!-- not run: it needs a card -->\n```html\n<!-- shown -->\n[x](../../src)\n```\ntext\n"

    assert (
        hook("sources").for_site(text, "how-to/hooks.md")
        == "```html\n<!-- shown -->\n[x](../../src)\n```\ntext\n"
    )


def test_words_have_their_meaning_at_their_first_use():
    """Once a page, in any form, not in a heading or a link; and the glossary is the only list of meanings."""
    words = hook("words")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/hooks.md"))
    html = '<h2><abbr title="m">Sites</abbr></h2><p><abbr title="m">Sites</abbr>, a <abbr title="m">site</abbr></p>'

    assert (
        words.on_page_content(html, page)
        == '<h2>Sites</h2><p><abbr title="m">Sites</abbr>, a site</p>'
    )
    assert words.forms()["Sites"].startswith("a place where values flow")
    assert {"Findings", "measured steps", "Selector"} <= {*words.forms()}
    assert not {"finding", "Recording"} & {*words.forms()}  # may be verbs
    assert "pass" not in words.meanings()
    assert words.meanings()["selector"] == "text that names sites: layer1.*:out.grad"


def test_a_notebook_is_a_page_with_its_outputs(tmp_path):
    """Text, code, what it printed, pictures and tables; without the colours of a terminal, and not what is empty."""
    outputs = [
        {"output_type": "stream", "text": ["\x1b[1mone\x1b[0m\n", "two\n"]},
        {
            "output_type": "display_data",
            "data": {"image/png": "iVBO\nRw0=\n", "text/plain": ["<Figure>"]},
        },
        {
            "output_type": "execute_result",
            "data": {"text/html": ["<table>\n\n", "<tr></tr></table>"], "text/plain": "table"},
        },
        {"output_type": "execute_result", "data": {"text/plain": ["3"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text."]},
        {"cell_type": "code", "source": ["x = 1\n", "x"], "outputs": outputs},
        {"cell_type": "code", "source": [], "outputs": []},
    ]
    notebook = tmp_path / "tour.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))

    assert hook("notebooks").page(notebook).split("\n\n") == [
        "# Title",
        "[The notebook itself](tour.ipynb), with its outputs, opens in Jupyter and VS Code.",
        "Text.",
        "```python\nx = 1\nx\n```",
        "```{.text .output}\none\ntwo\n```",
        '<p><img alt="The picture that this code draws" src="data:image/png;base64,iVBORw0="></p>',
        '<div class="output"><table>\n<tr></tr></table></div>',
        "```{.text .output}\n3\n```\n",
    ]


def test_api_pages_have_the_docstrings_of_the_running_program():
    """Nothing is imported to build the site, and yet `kedge.hook` has the arguments of the method that it stands for."""
    griffe = pytest.importorskip("griffe", reason="griffe is not installed")
    extensions = griffe.load_extensions(hook("docstrings").Docstrings)
    package = griffe.load("kedge", search_paths=[ROOT / "src"], extensions=extensions)

    assert package["hook"].docstring.value == inspect.getdoc(kedge.hook)
    assert package["offload.offload.offload"].docstring.value.count("::") == 0
    assert "Note [" not in package["store.recording.Recording.exponents"].docstring.value


def test_the_picture_of_the_steps_is_drawn_by_its_script():
    """``make generated`` draws it."""
    spec = importlib.util.spec_from_file_location("steps", ROOT / "docs/pictures/steps.py")
    steps = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(steps)

    assert (ROOT / "docs/pictures/steps.svg").read_text(encoding="utf-8") == "\n".join(
        steps.drawn()
    ) + "\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Some pages of the site, built with its settings."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    docs, built = tmp_path_factory.mktemp("docs"), tmp_path_factory.mktemp("site")
    for page in (HOME, GUIDE, GLOSSARY, API):
        (docs / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "docs" / page, docs / page)
    for folder in ("stylesheets", "javascripts"):
        shutil.copytree(ROOT / "docs" / folder, docs / folder)
    (docs / "pictures").mkdir()
    for picture in ("anchor.svg", "page-light.png", "page-nan.png"):
        shutil.copy(ROOT / "docs/pictures" / picture, docs / "pictures")
    command = [
        sys.executable,
        "-c",
        BUILD,
        ROOT / "mkdocs.yml",
        docs,
        built,
        HOME,
        GUIDE,
        GLOSSARY,
        API,
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return built


@pytest.fixture
def address(site):
    """The address at which these pages are served."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=site)
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def chromium():
    """A browser without a window."""
    with launched() as browser:
        yield browser


@pytest.mark.timing
def test_the_site_in_a_browser(chromium, address):
    """Accessible in light and dark, not wider than a phone; searched, with meanings at words, and nothing from outside."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="not installed").Axe()
    for theme in ("light", "dark"):
        context = chromium.new_context(viewport=LAPTOP, color_scheme=theme, reduced_motion="reduce")
        watched = Watched(context.new_page())
        page = watched.page
        for path in ("index.html", "how-to/hooks.html", "reference/api/actions.html"):
            page.goto(address + path)
            page.wait_for_selector("[data-md-color-scheme]")
            assert violations(axe, page) == []
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate(FITS)
        if theme == "light":
            page.set_viewport_size(LAPTOP)
            page.goto(address + "how-to/hooks.html")
            page.locator("abbr").first.hover()
            page.wait_for_selector(".md-tooltip2__inner:has-text('text that names sites')")
            page.click(".md-search__input")
            page.keyboard.type("error_if")
            page.wait_for_selector(".md-search-result__item a[href*='reference/api/actions']")
        context.close()
        assert watched.errors == []
        assert watched.from_outside() == []
