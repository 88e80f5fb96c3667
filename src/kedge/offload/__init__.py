"""Offloading: saved tensors kept by reference, rebuilt, moved or compressed, and the account of them.

`kedge.offload` is both this package and the function that offloads; Python binds a package to its
name in the parent as soon as anything in it is imported, so the package itself can be called.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return import_module("kedge.offload.offload").offload(*args, **options)


sys.modules[__name__].__class__ = _Callable
