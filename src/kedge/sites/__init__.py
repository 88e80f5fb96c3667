"""Where: the site language, and the sites that it selects on a model. Nothing here attaches hooks.

`kedge.sites` is both this package and the function that lists a model's sites; Python binds a package
to its name in the parent as soon as anything in it is imported, so the package itself can be called.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        return import_module("kedge.sites.table").sites(*args, **options)


sys.modules[__name__].__class__ = _Callable
