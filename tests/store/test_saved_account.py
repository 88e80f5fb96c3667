"""The tables of saved tensors."""

import pytest

from kedge.store.saved_account import BytesOverStep, SavedAccount, Sums
from kedge.store.saved_tables import sections


def test_a_large_holder_behind_many_equal_ones_is_listed() -> None:
    """Equal layers fill up the table in their order, and do not push out a larger row that follows them."""
    layers = tuple(Sums(f"layers.{number}", 1, 10, 10) for number in range(5))
    account = SavedAccount(
        Sums(tensors=6, packed=80, bytes=80),
        0,
        0,
        (),
        (*layers, Sums(None, 1, 30, 30)),
        (),
        (),
        BytesOverStep(),
    )

    by_module = next(table for table in sections(account, most=3) if table.title == "by module")

    assert [row[0] for row in by_module.rows] == ["layers.0", "layers.1", "(outside of modules)"]
    assert by_module.note.endswith(" 3 smaller modules left out.")


def tower(other: int = 0) -> SavedAccount:
    """Return the account of 48 blocks with two modules each; one block may save more than the others."""
    tree = [Sums("", 96, 2000, 2000)]
    for number in range(48):
        more = other if number == 17 else 0
        tree += [Sums(f"h.{number}", 2, 30 + more, 20, checkpoint=5)]
        tree += [Sums(f"h.{number}.attn", 1, 20 + more, 10), Sums(f"h.{number}.mlp", 1, 10, 10)]
    return SavedAccount(Sums(tensors=96), 0, 0, (), tuple(tree), (), (), BytesOverStep())


def by_module(account: SavedAccount, most: int | None) -> tuple[list[tuple[str, ...]], str]:
    """Return the rows of the table of modules, without the columns that are empty, and its note."""
    table = next(table for table in sections(account, most) if table.title == "by module")
    return [(*row[:4], row[-1]) for row in table.rows], table.note


def test_blocks_that_hold_the_same_are_one_line() -> None:
    """Its figures are the sums over them, and the note says so."""
    rows, note = by_module(tower(), 24)

    assert rows == [
        ("(the model)", "96", "2 kB", "2 kB", "-"),
        ("h.0-47", "96", "1.44 kB", "960 B", "240 B"),
        ("h.0-47.attn", "48", "960 B", "480 B", "-"),
        ("h.0-47.mlp", "48", "480 B", "480 B", "-"),
    ]
    assert "h.0-47: the sum over all of these blocks" in note


def test_a_block_that_holds_something_else_unfolds() -> None:
    """It stands right below the others; what is equal in it stays folded."""
    rows, _ = by_module(tower(other=4), 24)

    assert [row[0] for row in rows] == [
        *("(the model)", "h.0-16,18-47", "h.17", "h.0-16,18-47.attn", "h.17.attn", "h.0-47.mlp"),
    ]


@pytest.mark.parametrize(
    ("most", "left"), [(2, " 96 smaller modules left out."), (3, " 48 smaller modules left out.")]
)
def test_modules_of_lines_that_are_left_out_are_counted(most: int, left: str) -> None:
    """The note counts modules, not lines."""
    rows, note = by_module(tower(), most)

    assert len(rows) == most
    assert note.endswith(left)


def test_all_modules_are_listed_on_request() -> None:
    """Without a limit each has its own line."""
    rows, note = by_module(tower(), None)

    assert len(rows) == 145
    assert "sum over" not in note
