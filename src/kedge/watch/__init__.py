"""Watches a program: the models that it trains, the steps that are measured, and the recording.

`kedge.watch` is both this package and the function that watches a block; as with `kedge.offload`, the package can be
called.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return import_module("kedge.watch.run.block").watch(*args, **options)


sys.modules[__name__].__class__ = _Callable
