"""The page that a command writes instead of printing."""

from __future__ import annotations

from pathlib import Path


def write_page(file: Path, page: str) -> None:
    """Write a page, and print where it is."""
    from kedge.files.atomic_write import told

    with told(f"write {file}"):
        file.write_text(page, encoding="utf-8")
    print(f"{file}: {len(page) / 1e6:.1f} MB; open it in a browser")
