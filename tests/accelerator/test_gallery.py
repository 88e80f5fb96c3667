"""The gallery on the simulated device: every case of it again, with the numbers that must come out."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.gallery import (
    test_guided,
    test_modules,
    test_tensors,
    test_torch_examples,
    test_torch_hooks_page,
)

ABOUT_PAGES = {
    "test_the_lines_on_the_page_are_counted",
    "test_kedge_needs_no_more_lines_than_pytorch",
    "test_the_table_has_every_way_to_register_a_hook",
    "test_what_is_not_here_has_a_reason",
}


class DrawnOnTheHost(TorchFunctionMode):
    """Random inputs have the numbers of the CPU's generator, from which the gallery's results were worked out."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in (torch.randn, torch.rand):
            return function(*args, **kwargs)
        asks = kwargs.pop("requires_grad", False)
        return function(*args, **kwargs | {"device": "cpu"}).to("sim").requires_grad_(asks)


@pytest.fixture(autouse=True)
def _on_the_device(sim: Any) -> Iterator[None]:
    """Make tensors on the device where a test does not say otherwise."""
    torch.set_default_device("sim")
    with DrawnOnTheHost():
        yield
    torch.set_default_device(None)


for module in (test_guided, test_modules, test_tensors, test_torch_examples, test_torch_hooks_page):
    globals().update(
        {
            name: test
            for name, test in vars(module).items()
            if name.startswith("test_")
            and isinstance(test, FunctionType)
            and name not in ABOUT_PAGES
        }
    )
