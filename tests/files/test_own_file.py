"""A program may close Kedge's files and get their numbers: nothing is written to its own, and none of them is closed."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from kedge.errors import BeingWritten, RecordingError, StoreError
from kedge.files.own_file import HIGH, DescriptorTaken, OwnDescriptor, OwnFile, write_all
from kedge.offload.stores.disk import DiskStore
from kedge.store.events import NoteEvent
from kedge.store.recording import Recording
from kedge.store.writing.folder import create


@pytest.fixture
def numbers() -> Iterator[list[int]]:
    """Return a list of descriptors that are closed after the test, by `take`."""
    taken: list[int] = []
    yield taken
    for number in taken:
        os.close(number)


def take(number: int, path: Path, taken: list[int]) -> None:
    """Close a number as a program does, and open a file of the program's under it."""
    os.close(number)
    opened = os.open(path, os.O_RDWR | os.O_CREAT)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    taken.append(number)


def high_numbers() -> set[int]:
    """List Kedge's descriptors in this process."""
    return {number for number in map(int, os.listdir("/proc/self/fd")) if number >= HIGH // 4}  # noqa: PTH208


def test_a_file_goes_on_under_another_number(tmp_path: Path, numbers: list[int]) -> None:
    """What is written after the program has taken the number is in Kedge's file, behind what was there, and not in the program's."""
    with OwnFile(tmp_path / "own") as file:
        write_all(file, b"one ")
        number = file.fileno()
        take(number, tmp_path / "mine", numbers)
        write_all(file, b"two")
        file.cut(5)

        assert file.fileno() != number
    assert (tmp_path / "own").read_bytes() == b"one t"
    assert (tmp_path / "mine").read_bytes() == b""
    assert os.fstat(number).st_ino == (tmp_path / "mine").stat().st_ino


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_gone_too_is_an_error(
    replaced: bool, tmp_path: Path, numbers: list[int]
) -> None:
    """Nothing is written to a file that is at its path now, nor to the one that has its number."""
    file = OwnFile(tmp_path / "own")
    number = file.fileno()
    (tmp_path / "own").rename(tmp_path / "moved")
    if replaced:
        (tmp_path / "own").write_bytes(b"theirs")
    take(number, tmp_path / "mine", numbers)
    with pytest.raises(DescriptorTaken, match="closed the file, which is no longer at its path"):
        write_all(file, b"two")
    file.close()

    assert os.fstat(number).st_ino == (tmp_path / "mine").stat().st_ino
    assert not replaced or (tmp_path / "own").read_bytes() == b"theirs"


def test_the_program_may_open_the_same_file(tmp_path: Path, numbers: list[int]) -> None:
    """The same file under the same number is still the program's, if the program has opened it."""
    file = OwnFile(tmp_path / "own")
    number = file.fileno()
    take(number, tmp_path / "own", numbers)
    write_all(file, b"one")
    assert file.fileno() != number
    file.close()

    assert os.read(number, 9) == b"one"


def test_a_file_without_a_name_is_lost(tmp_path: Path, numbers: list[int]) -> None:
    """It cannot be opened again, even if the program's next file gets its inode as well."""
    opened = os.open(tmp_path / "own", os.O_RDWR | os.O_CREAT)
    (tmp_path / "own").unlink()
    file = OwnDescriptor(opened)
    take(file.fileno(), tmp_path / "mine", numbers)
    with pytest.raises(DescriptorTaken):
        file.fileno()
    file.close()

    assert os.fstat(numbers[0])


def test_numbers_are_high_where_the_system_allows_it(tmp_path: Path) -> None:
    """The program's files get the numbers that they have without Kedge; under a small limit Kedge's are as high as it allows."""
    free = os.open(tmp_path, os.O_RDONLY)
    os.close(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with OwnFile(tmp_path / "own") as file:
        again = os.open(tmp_path, os.O_RDONLY)
        os.close(again)
        assert again == free
        assert file.fileno() >= min(HIGH, limits[0] // 2)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
        with OwnFile(tmp_path / "own") as file:
            assert 100 <= file.fileno() < 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_dropped_file_is_closed(tmp_path: Path) -> None:
    """An object that nobody closes leaves no descriptor."""
    before = high_numbers()
    file = OwnFile(tmp_path / "own")
    assert len(high_numbers() - before) == 1
    del file
    assert high_numbers() == before


def test_a_recording_and_its_lock_go_on(tmp_path: Path, numbers: list[int]) -> None:
    """After the program has closed all that it did not open, the recording is whole, and still kept from being replaced."""
    path, before = tmp_path / "r.kedge", high_numbers()
    writer = create(path, {}, force=False)
    writer.sites([{"id": 0, "site": "a:out"}], [])
    writer.stats(0, {"site": [0]})
    mine = sorted(high_numbers() - before)
    for number in mine:
        take(number, tmp_path / f"mine-{number}", numbers)
    writer.stats(1, {"site": [0]})
    writer.event(NoteEvent(step=1))
    with pytest.raises(BeingWritten):
        create(path, {}, force=True)
    writer.close()

    assert len(mine) == 3
    assert [(tmp_path / f"mine-{number}").read_bytes() for number in mine] == [b""] * 3
    recording = Recording.open(path)
    assert (recording.steps.tolist(), recording.events) == (
        [0, 1],
        (NoteEvent(step=1),),
    )
    create(path, {}, force=True).close()


def test_a_recording_that_is_gone_too_is_reported(tmp_path: Path, numbers: list[int]) -> None:
    """Where the files are no longer at their places, the error says so, and nothing is written anywhere."""
    path, before = tmp_path / "r.kedge", high_numbers()
    writer = create(path, {}, force=False)
    mine = sorted(high_numbers() - before)
    path.rename(tmp_path / "moved.kedge")
    for number in mine:
        take(number, tmp_path / f"mine-{number}", numbers)
    with pytest.raises(
        RecordingError,
        match=r"the program has closed the file, which is no longer at its path; do not move or remove it",
    ):
        writer.stats(1, {"site": [0]})
    with pytest.raises(RecordingError):
        writer.close()

    assert [(tmp_path / f"mine-{number}").read_bytes() for number in mine] == [b""] * 3


def test_saved_tensors_never_reach_the_programs_file(tmp_path: Path, numbers: list[int]) -> None:
    """Tensors in a file that the program has closed are lost and never other bytes; the next ones get a file of their own."""
    with closing(DiskStore(tmp_path)) as store:
        data = torch.arange(50_000, dtype=torch.uint8)
        early = store.put(data)
        take(early.piece.filling.file.fileno(), tmp_path / "mine", numbers)
        late = store.put(data)
        with pytest.raises(
            StoreError,
            match="the program has closed the file; let the program close only files that it",
        ):
            early.get()
        assert torch.equal(late.get(), data)
        early.free()
        late.free()

    assert (tmp_path / "mine").read_bytes() == b""
    assert os.fstat(numbers[0]).st_ino == (tmp_path / "mine").stat().st_ino
