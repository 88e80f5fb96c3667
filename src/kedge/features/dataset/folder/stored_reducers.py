"""The reducers of one rank, and the file of their state."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kedge.errors import ExtractionFailed, KedgeError, NotFeatures
from kedge.features.dataset.folder.checksums import OWN, state_sum
from kedge.features.dataset.folder.files import STATE, rename_whole
from kedge.features.dataset.folder.formats import safetensors
from kedge.features.dataset.samples.batch import Columns
from kedge.features.dataset.samples.placed import why
from kedge.features.reduce.reducer import Reducer
from kedge.files.atomic_write import told
from kedge.json_input.reading import open_regular

_RESERVED = "#"


class StoredReducers:
    """The reducers of one rank; they continue from the state in the folder.

    Args:
        folder: The folder.
        rank: The rank.
        reducers: For each site its reducers, which are copied.
    """

    def __init__(self, folder: Path, rank: int, reducers: Mapping[str, Sequence[Reducer]]) -> None:
        self._path = folder / STATE.format(rank=rank)
        self._reducers = {
            name: [copy.deepcopy(one) for one in some] for name, some in reducers.items()
        }
        if self._reducers and self._path.exists():
            states = read_state(self._path)
            for name, some in self._reducers.items():
                for number, reducer in enumerate(some):
                    reducer.load(states[name][number])

    def __contains__(self, name: str) -> bool:
        return name in self._reducers

    def update(self, columns: Columns) -> None:
        """Update the reducers with the values of a batch.

        Raises:
            ExtractionFailed: A reducer failed.
        """
        for name, value in columns.values.items():
            for reducer in self._reducers.get(name, ()):
                _take_in(reducer, name, value, columns.keys)

    def write(self, through: int) -> None:
        """Write the state, if there are reducers.

        Args:
            through: The number of the last shard that it counts.
        """
        if not self._reducers:
            return
        pieces = {
            f"{name}{_RESERVED}{number}{_RESERVED}{part}": tensor
            for name, some in self._reducers.items()
            for number, reducer in enumerate(some)
            for part, tensor in reducer.state().items()
        }
        temporary = self._path.with_name(f".{self._path.name}.part")
        with told(f"write {self._path}"):
            try:
                shapes = {name: tensor.shape for name, tensor in pieces.items()}
                about = {"through": str(through), OWN: state_sum(pieces)}
                safetensors.write_pieces(
                    temporary, {name: [t] for name, t in pieces.items()}, shapes, about
                )
                rename_whole(temporary, self._path)
            finally:
                temporary.unlink(missing_ok=True)


def _take_in(reducer: Reducer, name: str, value: Tensor, keys: Sequence[str]) -> None:
    """Update a reducer, which may be the user's own, with the values of a batch."""
    try:
        reducer.update(value, keys)
    except KedgeError:
        raise
    except Exception as error:
        raise ExtractionFailed(
            f"the reducer {type(reducer).__name__} of {name!r} failed at the batch of sample {keys[0]!r}, values of "
            f"shape {tuple(value.shape)}: {why(error)}; fix it, and name another folder, as its present values are "
            "incomplete"
        ) from error


def read_state(path: Path) -> dict[str, list[dict[str, Tensor]]]:
    """Return the states of a rank's reducers: for each site a list."""
    states: dict[str, list[dict[str, Tensor]]] = {}
    try:
        with told(f"read {path}"):
            open_regular(path).close()
        with told(f"read {path}"), safe_open(path, "pt") as file:
            pieces = {full: file.get_tensor(full) for full in file.keys()}  # noqa: SIM118 - it is no mapping
            own = (file.metadata() or {}).get(OWN)
        for full in sorted(
            pieces,
            key=lambda full: (full.rsplit(_RESERVED, 2)[0], int(full.rsplit(_RESERVED, 2)[1])),
        ):
            name, number, part = full.rsplit(_RESERVED, 2)
            some = states.setdefault(name, [])
            if int(number) == len(some):
                some.append({})
            some[int(number)][part] = pieces[full]
    except (SafetensorError, ValueError, IndexError) as error:
        raise _damaged(path, error) from error
    if own is not None and own != state_sum(pieces):
        raise _damaged(path, "its values have changed")
    return states


def _damaged(path: Path, found: object) -> NotFeatures:
    return NotFeatures(
        f"{path} is damaged ({found}); the reduced values are lost, so name another folder"
    )
