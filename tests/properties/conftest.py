"""What the properties borrow from other folders."""

from __future__ import annotations

from tests.features.conftest import no_threads_of_zarr

__all__ = ["no_threads_of_zarr"]
