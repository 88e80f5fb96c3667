from collections.abc import Iterable
from typing import Any

from torch import Tensor

COLUMNS: int
DRAWN: int
BUCKETS: int
FULL: int
NORM: int
FINITE: int
SHARED: int
RELEASED: int
REFUSED: int
DONE: int
FRESH: int
NEW_SOURCE: int
NO_ROOM: int
AS_VALUE: int
AS_OUTPUT: int
AS_INPUT: int

def connect(
    tensor: type[Tensor],
    parameter: type[Tensor],
    is_neg: Any,
    is_conj: Any,
    get_num_threads: Any,
    /,
) -> None: ...
def measure_into(table: Any, row: int, tensor: Tensor, what: int = 0, /) -> int: ...
def measure_many(
    table: Any, first_row: int, tensors: Iterable[Tensor | None], what: int = 0, /
) -> list[int]: ...
def squares_and_nonfinite(tensors: Iterable[Tensor | None], /) -> tuple[float, int, list[int]]: ...
def channels_above_zero(tensor: Tensor, dim: int, /) -> bytes | None: ...
def draw_many(numbers: Any, tensors: Iterable[Tensor], most: int, /) -> list[int]: ...
def squared_changes(
    numbers: Any, tensors: Iterable[Tensor], counts: Iterable[int], most: int, /
) -> tuple[list[int], list[float]]: ...
def histograms(buckets: Any, rows: int, /) -> list[bytes]: ...

class Measurer:
    source: int | None

    def use_arrays(
        self,
        rows: Any,
        sampled: Any,
        buckets: Any,
        sites: Any,
        at: Any,
        saturated: Any,
        used: Any,
        /,
    ) -> None: ...
    def saturates(self, site: int, low: float, high: float, /) -> None: ...
    def observe(self, tensor: Tensor, site: int, role: int, what: int, draws: bool, /) -> int: ...
    def observe_all(
        self, tensors: Iterable[Tensor], sites: Iterable[int], what: int, draws: bool, /
    ) -> list[int]: ...
    def draw_for_last(self, tensor: Tensor, /) -> bool: ...
    def forget(self) -> None: ...

def instruction_sets() -> list[str]: ...
def use(instruction_set: str, /) -> str: ...
