"""Skipping a module: an action that gives the output of a call, whose forward does not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kedge.calls.arguments import called_as, described
from kedge.errors import EditError, NoSuchKind, WrongCall
from kedge.sites import leaves
from kedge.sites.site import Site


class Skip:
    """Gives the output of a module's call from its inputs; hooks call it in place of the forward.

    Args:
        value: A tensor, a function of the inputs, or None for the first input.

    Attributes:
        skips: True: it runs in place of a forward, and not on its value.
        passes_on: Whether the first input is the output.
    """

    skips = True

    def __init__(self, value: Any) -> None:
        self.value = value
        self.passes_on = value is None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of a call with these inputs."""
        if isinstance(self.value, Tensor):
            return self.value.clone()
        if not self.passes_on:
            return self.value(*args, **kwargs)
        first = next(iter((*args, *kwargs.values())), None)
        if not leaves.find(first):
            raise EditError(
                "without a value the first input of a call is its output, and this call has "
                f"{described(first)} there; give the output, as in "
                "kedge.skip(lambda *args, **kwargs: ...)"
            )
        return first

    def __repr__(self) -> str:
        """The call that makes this action."""
        if self.passes_on:
            return "skip()"
        if isinstance(self.value, Tensor):
            return "skip(tensor)"
        return f"skip({getattr(self.value, '__name__', type(self.value).__name__)})"

    def bind(self, site: Site) -> Any:
        """Return the function that gives the output at a site: itself."""
        self.check(site)
        return self

    def check(self, site: Site) -> None:
        """Refuse sites that are not the whole output of a module.

        Raises:
            NoSuchKind: At any other site.
        """
        if site.op is not None:
            raise NoSuchKind(
                f"{self!r} at {site}: only modules can be skipped; to change what an "
                "operation returns, use kedge.replace(...)"
            )
        if site.kind != "out":
            raise NoSuchKind(
                f"{self!r} at {site}: only modules can be skipped, at :out, as in "
                'hook(model, "layer4", kedge.skip())'
            )
        if site.leaf is not None:
            raise NoSuchKind(
                f"{self!r} at {site}: a module is skipped as a whole; leave out "
                f"[{site.leaf}], and give all of its output"
            )


@called_as('kedge.hook(model, "h.3.mlp", kedge.skip())')
def skip(value: Tensor | Callable[..., Any] | None = None) -> Skip:
    """Skip a module: its forward does not run, nor do the modules inside it. An action for `kedge.hook`.

    Hooks on the module itself run, and see the value as its output.

    Args:
        value: The output: a tensor, of which the model receives a copy; or a function, also another
            module, that is called with the inputs in place of the module. None for the first input
            itself, as `torch.nn.Identity` returns it.

    Returns:
        The action.

    Raises:
        WrongCall: If the value is neither a tensor nor a function.

    Examples:
        >>> with kedge.hook(model, "relu", kedge.skip()):
        ...     output = model(images)
    """
    if isinstance(value, type) or not (
        value is None or isinstance(value, Tensor) or callable(value)
    ):
        raise WrongCall(
            f"skip({described(value)}): give a tensor, a function of the module's inputs, or "
            "nothing for the first input, such as kedge.skip(lambda x: x * 2)"
        )
    return Skip(value)
