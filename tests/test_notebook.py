"""Tables in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import kedge
from kedge import notebook
from kedge.recipes import patch


class Reader(HTMLParser):
    """Reads tables: the cells of each row, and which tags there are; refuses what is not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tags, self.open = [], set(), []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def cell(self, column, row=1):
        return self.rows[row][self.rows[0].index(column)]


def test_everything_is_escaped():
    """Whatever a model, a hook or an error is called, it is read as text."""
    wild = '<script>alert("&")</script>'
    read = Reader(notebook.table((wild, "n"), [(wild, 1)], title=wild, note=wild))

    assert read.rows == [[wild, "n"], [wild, "1"]]
    assert read.tags <= {"table", "thead", "tbody", "tr", "th", "td", "p", "strong", "div"}


@pytest.mark.parametrize(("rows", "open_rows"), [(0, 0), (15, 15), (16, 12), (500, 12)])
def test_a_long_table_is_folded(rows, open_rows):
    """A long table shows its first rows and folds the others away; no row is left out, and none is folded alone."""
    text = notebook.table(("a",), [(i,) for i in range(rows)])
    shown, _, folded = text.partition("<details>")
    cells = [row[0] for row in Reader(text).rows if row[0] != "a"]

    assert len([row for row in Reader(shown).rows if row[0] != "a"]) == open_rows
    assert cells == [str(i) for i in range(rows)]
    assert (f"<summary>{rows - open_rows:,} more</summary>" in folded) is (rows > open_rows)


def test_a_table_takes_the_colours_of_its_page():
    """No colour is named, so that a table reads on a light and on a dark page."""
    text = notebook.table(("a", "b"), [("x", 1)], align="mr", note="n")

    assert "#" not in text
    assert "rgb(" not in text
    assert "currentColor" in text


def test_a_row_of_another_length_is_refused():
    """A table whose rows do not fit its columns is not drawn crooked."""
    with pytest.raises(ValueError, match="zip"):
        notebook.table(("a", "b"), [("x",)])


def test_a_table_as_text_has_the_rows_of_its_html():
    """Columns line up, figures to the right; a limit leaves out rows, and says how many, only where several go."""
    table = notebook.Table(("site", "n"), [(f"s{i}", 10**i) for i in range(6)], "mr", note="a note")

    assert table.text().splitlines()[:3] == ["site       n", "s0         1", "s1        10"]
    assert table.text().endswith("s5    100000\na note")
    assert table.text(3) == table.text()
    assert table.text(2).splitlines()[2:] == ["s1    10", "... and 4 more", "a note"]
    assert Reader(table.html()).rows[1] == ["s0", "1"]
    assert notebook.Table(("a",), [], "m").text() == "a"


@pytest.fixture
def model():
    """A small model whose modules have names that HTML would read otherwise."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    net.add_module("a<b>", nn.Linear(4, 2))
    return net


def test_what_there_is_can_be_read_in_a_notebook(model):
    """Sites and selections show every row that their text has."""
    sites, chosen = kedge.sites(model), kedge.select("**{Linear}").on(model)

    assert [row[0] for row in Reader(sites._repr_html_()).rows[1:]] == [
        row.path or '""' for row in sites
    ]
    assert Reader(sites._repr_html_()).cell("type", 2) == "Linear"
    assert [row[0] for row in Reader(chosen._repr_html_()).rows[1:]] == [
        str(site) for site in chosen
    ]


def test_what_happened_can_be_read_in_a_notebook(model):
    """A ledger shows counts and causes, a timeline each firing, in the order of their text."""
    with kedge.session() as session:
        session.hook(model, "0, 1", lambda v: None)
        model(torch.ones(2, 3))
        timeline = Reader(session.timeline()._repr_html_())
        ledger = Reader(session.ledger()._repr_html_())

    assert [(row[0], row[1]) for row in ledger.rows[1:]] == [("0:out", "1"), ("1:out", "1")]
    assert [row[3] for row in timeline.rows[1:]] == ["0:out", "1:out"]


def test_a_ledger_says_why_in_a_notebook(model):
    """A site that never fired has its cause, and what to do."""
    with pytest.warns(kedge.errors.NeverFiredWarning):
        with kedge.session() as session:
            session.hook(model, "1", lambda v: None)
            ledger = Reader(session.ledger()._repr_html_())

    assert ledger.cell("fired") == "0"
    assert ledger.cell("cause").startswith("never: ")
    assert "no site was hooked" in kedge.session().ledger()._repr_html_()


def test_an_audit_can_be_read_in_a_notebook(model):
    """Each hook has a row with its place, kind and owner, and below stands what the hooks do."""
    model[0].register_forward_hook(lambda *_: None)
    read = Reader(kedge.audit(model)._repr_html_())

    assert (read.cell("place"), read.cell("kind")) == ("0", "forward")
    assert any(row[0] == "compile" for row in read.rows)
    assert "this model has no hooks" in kedge.audit(nn.ReLU())._repr_html_()


def test_statistics_can_be_read_in_a_notebook(model):
    """What was measured has a row a site, with the figures of its newest step."""
    stats = kedge.measure()
    with kedge.session() as session:
        handle = session.hook(model, "0, 1", stats)
        assert "nothing is measured yet" in stats._repr_html_()
        model(torch.ones(2, 3))
        read = Reader(stats._repr_html_())
        one = Reader(handle["1"]._repr_html_())

    assert [row[0] for row in read.rows[1:]] == ["0:out", "1:out"]
    assert one.rows[1:] == read.rows[2:]
    assert float(read.cell("min", 2)) >= 0


def test_a_handle_shows_what_its_actions_hold(model):
    """The handle of a measuring hook is the table of its statistics; one whose actions have none shows its ledger."""
    with kedge.session() as session:
        stats = session.hook(model, "0, 1", kedge.measure())
        plain = session.hook(model, "**", lambda v: None)
        model(torch.ones(2, 3))

        assert stats._repr_html_() == stats.actions[0]._repr_html_()
        assert plain._repr_html_() == plain.ledger()._repr_html_()
        assert (
            repr(stats).splitlines()[0] == "<hook measure('full') at 0:out, 1:out: fired 2 times>"
        )
        assert repr(plain).endswith(" at :out, 0:out, 1:out and 1 more: fired 4 times>")


def test_the_effects_of_patches_can_be_read_in_a_notebook(model):
    """Each patch has the row that it has in the text, under the metrics of the two inputs."""
    table = patch(model, torch.ones(1, 3), -torch.ones(1, 3), "0, 1", torch.sum, along=1)
    read = Reader(table._repr_html_())

    assert [" ".join(row) for row in read.rows[1:]] == [
        " ".join(line.split()) for line in str(table).splitlines()[1:]
    ]
    assert str(table).splitlines()[0] in table._repr_html_()


def test_a_account_can_be_read_in_a_notebook(model):
    """The tables of an account have the cells of its text."""
    account = kedge.saved(model)(torch.ones(2, 3))
    cells = {cell for row in Reader(account._repr_html_()).rows for cell in row if cell}

    assert "checkpoint" in cells
    assert all(cell.strip() in str(account) for cell in cells)
