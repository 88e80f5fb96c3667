"""The tables of saved tensors."""

from kedge.store.saved_account import BytesOverStep, SavedAccount, Sums, sections


def test_a_large_holder_behind_many_equal_ones_is_listed() -> None:
    """Equal layers fill up the table in their order, and do not push out a larger row that follows them."""
    layers = tuple(Sums(f"layers.{number}", 1, 10, 10) for number in range(5))
    account = SavedAccount(
        Sums(tensors=6, packed=80, bytes=80), 0, 0, (), (*layers, Sums(None, 1, 30, 30)), (), (), BytesOverStep()
    )

    by_module = next(table for table in sections(account, most=3) if table.title == "by module")

    assert [row[0] for row in by_module.rows] == ["layers.0", "layers.1", "(outside of modules)"]
    assert by_module.note.endswith(" 3 smaller modules left out.")
