"""Names of a package that are loaded when they are first used, and so cost an import nothing."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing's own would cost four times the rest of `import kedge`
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from kedge.calls import unknown_names  # noqa: F401 - see `load`


def late_names(
    package: str, homes: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package (PEP 562).

    ``dir`` lists the public names and nothing else, so that completion offers nothing private.

    Args:
        package: The package.
        homes: The names, by the module of Kedge that each is loaded from.
        modules: The public modules of the package.
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    offered = sorted([*home_of, *modules])

    def load(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name in home_of:
            return getattr(import_module(f"kedge.{home_of[name]}"), name)
        if name.startswith("_"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # It needs more of the standard library than all the rest.
        messages: Any = import_module("kedge.calls.unknown_names")
        raise AttributeError(messages.unknown_name(package, name, offered))

    def listed() -> list[str]:
        version = ["__version__"] if package == "kedge" else []
        return [*version, *offered]

    return load, listed
