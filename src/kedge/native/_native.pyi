from collections.abc import Callable, Iterable
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
NO_TABLE: int
CAPTURED: int
ACTIVE: int
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
def connect_driver(
    kind: int,
    launch: int,
    fill_bytes: int,
    current_place: int,
    go_to: int,
    capturing: int,
    current_stream: int,
    /,
) -> None: ...
def stream_function() -> int: ...
def measure_into(table: Any, row: int, tensor: Tensor, what: int = 0, /) -> int: ...
def measure_many(
    table: Any, first_row: int, tensors: Iterable[Tensor | None], what: int = 0, /
) -> list[int]: ...
def same_entries(tables: list[dict[Any, Any]], names: list[Any], values: list[Any], /) -> bool: ...
def squares_and_nonfinite(tensors: Iterable[Tensor | None], /) -> tuple[float, int, list[int]]: ...
def channels_above_zero(tensor: Tensor, dim: int, /) -> bytes | None: ...
def draw_many(numbers: Any, tensors: Iterable[Tensor], most: int, /) -> list[int]: ...
def squared_changes(
    numbers: Any, tensors: Iterable[Tensor], counts: Iterable[int], most: int, /
) -> tuple[list[int], list[float]]: ...
def histograms(buckets: Any, rows: int, /) -> list[bytes]: ...

class Measurer:
    source: int | None
    measured: int

    def use_arrays(
        self,
        rows: Any,
        sampled: Any,
        buckets: Any,
        there: Any,
        sites: Any,
        at: Any,
        saturated: Any,
        used: Any,
        /,
    ) -> None: ...
    def saturates(self, site: int, low: float, high: float, /) -> None: ...
    def observe(
        self, tensor: Tensor, site: int, role: int, what: int, draws: bool, dim: int = -1, /
    ) -> int: ...
    def observe_all(
        self, tensors: Iterable[Tensor], sites: Iterable[int], what: int, draws: bool, /
    ) -> list[int]: ...
    def draw_for_last(self, tensor: Tensor, /) -> int: ...
    def use_device(
        self,
        index: int,
        place: int,
        tick: float,
        kernels: tuple[int, ...],
        rows: int,
        arrived: int,
        parts: int,
        first: int,
        room: int,
        parts_room: int,
        /,
    ) -> None: ...
    def take_stream(self, index: int, /) -> bool: ...
    def rows_used(self, index: int, /) -> int: ...
    def take_rows(self, index: int, rows: int, /) -> int: ...
    def short_way(
        self,
        role: int,
        is_gradient: bool,
        is_under_jit: Callable[[], bool],
        long_way: Callable[[Tensor, int, str, int], int | None],
        /,
    ) -> Callable[[Tensor, int, str], None]: ...
    def open_step(
        self,
        step: int,
        what: int = 0,
        draws: bool = False,
        forwards: bool = False,
        gradients: bool = False,
        /,
    ) -> None: ...
    def forget(self) -> None: ...

def instruction_sets() -> list[str]: ...
def use(instruction_set: str, /) -> str: ...
