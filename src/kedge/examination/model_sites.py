"""The public `kedge.sites`: the places of a model, or with its arguments what each module takes."""

from __future__ import annotations

from typing import Any, overload

from torch import nn

from kedge.calls.arguments import called_as, noted_arguments
from kedge.errors import WrongCall
from kedge.examination.module_costs import ModelCosts, costs_of
from kedge.sites.select import ModelLayout
from kedge.sites.table import Sites, sites_of


@overload
def sites(model: nn.Module, /) -> Sites: ...


@overload
def sites(model: nn.Module, /, *args: Any, **kwargs: Any) -> ModelCosts: ...


@called_as("kedge.sites(model), or kedge.sites(model, x) for what each module takes")
def sites(model: nn.Module, /, *args: Any, **kwargs: Any) -> Sites | ModelCosts:
    """List every place of a model that can be hooked; with its arguments, what each module takes.

    Lists and dicts of modules are left out, because they are never called. A module or parameter
    with several names has one row, under its first name.

    With arguments the model is called with them some times, with gradients on, and the table has the
    parameters, output shapes, multiply-adds, bytes saved for backward and time of each module that
    was called. Random numbers, buffers and the attributes of its modules are put back.

    Args:
        model: The model.
        args: Arguments of the model by position.
        kwargs: Those by name.

    Returns:
        The places, as a table that prints; with arguments a `ModelCosts`.

    Raises:
        WrongCall: A text that names a module is given in place of an argument.

    Examples:
        >>> print(kedge.sites(torch.nn.ReLU()))
        path  type  sites
        ""    ReLU  :out :in :out.grad :in.grad :in.share :saved
        >>> kedge.sites(torch.nn.Linear(3, 5), torch.ones(2, 3))[""].multiply_adds
        30
    """
    if not args and not kwargs:
        return sites_of(model)
    if args and isinstance(args[0], str) and args[0] in ModelLayout(model).modules:
        raise WrongCall(
            f"kedge.sites(model, {args[0]!r}): what follows the model are the arguments of its call, "
            f'as in kedge.sites(model, x); for the sites of "{args[0]}", '
            f'kedge.select("{args[0]}").on(model)'
        )
    with noted_arguments(model, args, kwargs):
        return costs_of(model, args, kwargs)
