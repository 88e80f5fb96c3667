"""Ways to spoil files: bytes, JSON values, and what stands in a file's place."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

#: What stands where another value was. Hypothesis shrinks towards the first ones.
VALUES: list[Any] = [
    None, True, 0, -1, 1, 7, 0.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**30, "", "x", "out", "nan",
    "\x1b[31m", "a\nb\tc\r", "\u202eright", "\ud800", "\udcff", "x" * 5000, "../../etc/passwd", "/dev/zero", ".", "ä.*[b]{#1}",
    [], {}, [[]], [None], [-1], [0, 1], {"": {}}, {"kind": "end"}, [["a", 1]], ["x"] * 40, "a:out", ":", "loss", "*", "#", "2026-01-01",
]  # fmt: skip
#: What stands where a whole document was.
DOCUMENTS = [
    b"", b"\n", b"{", b"[]", b"{}", b"null", b"NaN", b"7", b'"x"', b"\xef\xbb\xbf{}", b"\xff\xfe{\x00}\x00", b"\x00" * 100,
    b"[" * 100_000, b'{"a":' * 50_000, b"{}\n" * 3, b'{"kind": "end"}\n', b'{"a": 1, "a": 2}', b'{"format": 1}', b'{"format": 2}',
    b'{"format": 2, "kedge": "\\u001b[31mred\\n\\n"}', b'{"format": 1e400}', b'{"format": Infinity}', b"1" * 5000,
    b'{"format": ' + b"9" * 4000 + b"}", b'{"roots": [], "sites": []}', b"\xff\xff\xff\xff\x00\x00\x00\x00", b"\xff\xff\xff\xff\xff\xff\xff\x7f",
]  # fmt: skip
PLACES = ["removed", "folder", "pipe", "zero", "loop", "dangling", "socket", "unreadable"]

Spoil = Callable[[Path], None]


def _fraction(many: int, part: float) -> int:
    return min(int(part * many), max(many - 1, 0))


def spoil_bytes(file: Path, how: str, part: float, value: int, length: int) -> None:
    """Change the bytes of a file somewhere."""
    content = bytearray(file.read_bytes())
    at = _fraction(len(content), part)
    if how == "flip" and content:
        content[at] ^= value or 1
    elif how == "cut":
        del content[at:]
    elif how == "drop":
        del content[at : at + length]
    elif how == "double":
        content[at:at] = content[at : at + length]
    elif how == "fill":
        content[at : at + length] = bytes([value]) * min(length, len(content) - at)
    elif how == "number":  # eight bytes, as lengths and numbers are
        content[at - at % 8 : at - at % 8 + 8] = ((value - 128) * 257**length % 2**64).to_bytes(
            8, "little"
        )
    file.write_bytes(content)


def spoil_whole(file: Path, content: bytes) -> None:
    """Write something else into a file."""
    file.write_bytes(content)


def spoil_place(file: Path, how: str) -> None:
    """Put something else in the place of a file."""
    if how == "unreadable":
        file.chmod(0)
        return
    file.unlink()
    if how == "folder":
        file.mkdir()
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "socket":
        here = Path.cwd()
        os.chdir(file.parent)  # a path of a socket has at most 107 bytes
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(file.name)
        os.chdir(here)
    elif how != "removed":
        file.symlink_to({"zero": "/dev/zero", "loop": file.name, "dangling": "nowhere"}[how])


def _holders(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each place in a document, as a container and a key."""
    if isinstance(value, dict | list):
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _holders(inner)


def spoil_value(document: Any, how: str, part: float, value: Any) -> None:
    """Change one value of a document, which is an object or a list."""
    places = list(_holders(document))
    if not places:
        return
    holder, key = places[_fraction(len(places), part)]
    if how == "removed":
        del holder[key]
    elif how == "doubled" and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif how == "renamed" and isinstance(holder, dict):
        holder[str(value)[:50]] = holder.pop(key)
    elif how == "wrapped":
        holder[key] = [holder[key]]
    elif how == "swapped":
        other, name = places[_fraction(len(places), part * 7 % 1)]
        holder[key] = other[name] if not isinstance(other[name], dict | list) else value
    else:
        holder[key] = value


def spoil_json(file: Path, how: str, part: float, value: Any) -> None:
    """Change a value in a file of JSON, or in one of its lines."""
    lines = file.read_bytes().split(b"\n")
    try:
        if file.suffix == ".json":
            document = json.loads(b"\n".join(lines))
            spoil_value(document, how, part, value)
            file.write_text(json.dumps(document))
            return
        at = _fraction(len(lines), part)
        line = json.loads(lines[at])
        spoil_value(line, how, part * 31 % 1, value)
        lines[at] = json.dumps(line).encode()
        file.write_bytes(b"\n".join(lines))
    except ValueError:
        return  # it is spoilt already


parts = st.floats(0, 1, exclude_max=True, allow_subnormal=False)
byte_ways = st.sampled_from(["flip", "cut", "drop", "double", "fill", "number"])
value_ways = st.sampled_from(
    ["set", "set", "set", "removed", "doubled", "renamed", "wrapped", "swapped"]
)
on_bytes = st.tuples(
    st.just(spoil_bytes), byte_ways, parts, st.integers(0, 255), st.integers(1, 20)
)
on_json = st.tuples(st.just(spoil_json), value_ways, parts, st.sampled_from(VALUES))
on_place = st.tuples(st.just(spoil_place), st.sampled_from(PLACES))
on_whole = st.tuples(st.just(spoil_whole), st.sampled_from(DOCUMENTS))


def spoilers(files: st.SearchStrategy[str]) -> st.SearchStrategy[list[tuple[str, tuple[Any, ...]]]]:
    """Return a strategy for one or two changes, each with the name of its file; see `spoil`."""
    kinds = st.one_of(
        on_json,
        on_json,
        on_json,
        on_json,
        on_json,
        on_bytes,
        on_bytes,
        on_bytes,
        on_whole,
        on_place,
    )
    return st.lists(st.tuples(files, kinds), min_size=1, max_size=2)


def spoil(folder: Path, changes: list[tuple[str, tuple[Any, ...]]]) -> None:
    """Make changes to the files of a folder."""
    for name, (change, *arguments) in changes:
        file = folder / name
        if file.is_file() and not file.is_symlink() and file.stat().st_mode & stat.S_IRUSR:
            change(file, *arguments)


def fresh(source: Path, folder: Path) -> Path:
    """Return a copy of a folder in the place of an earlier one."""
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(source, folder))
