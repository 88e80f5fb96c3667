"""The entry point `kedge.offload`: a context, or a module in the place of a layer."""

from __future__ import annotations

from types import TracebackType
from typing import Any, overload

from torch import nn

from kedge.calls.arguments import called_as, described
from kedge.errors import OffloadError
from kedge.hooks.placing.stand_in import StandIn, around_of, layer_of, original, stand_in
from kedge.offload.destination import Destination, Rebuild
from kedge.offload.offloading import EVERYTHING, Offloading, OffloadSettings
from kedge.offload.outcomes import OffloadAccount

_REBUILD = Rebuild()


class _Account:
    """The attribute `account`: the layer's own, if it has one of that name; else the offload's."""

    def __get__(self, made: Offload | None, kind: type[Offload]) -> Any:
        if made is None:
            return self
        try:
            return original(made).account
        except AttributeError:
            return around_of(made).account


class Offload(StandIn):
    """A module in the place of a layer that offloads what is saved in its calls; also a context, for a block.

    Attributes:
        account: The outcome of all saved tensors, in all blocks and calls.
    """

    __slots__ = ()
    account: OffloadAccount = _Account()  # type: ignore[assignment]

    def __enter__(self) -> OffloadAccount:
        """Offload the tensors saved on this thread from now on, and on others while they call the model."""
        account: OffloadAccount = around_of(self).__enter__()
        return account

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the block; saved tensors can be read as long as they are needed."""
        around_of(self).__exit__(kind, error, traceback)

    def __repr__(self) -> str:
        """The call that makes it."""
        settings = around_of(self).settings
        layer = layer_of(self)
        if isinstance(layer, Offload):
            return f"kedge.offload({layer!r}{settings})"
        return f"kedge.offload({super().__repr__()}{settings})"


@overload
def offload(
    model: nn.Module,
    where: str = ...,
    *,
    to: Destination = ...,
    min_bytes: str | int = ...,
    codec: str | None = ...,
    max_memory: str | int | None = ...,
    max_slowdown: float | None = ...,
    recompute: str | None = ...,
) -> Offload: ...


@overload
def offload(
    model: None = None,
    where: str = ...,
    *,
    to: Destination = ...,
    min_bytes: str | int = ...,
    codec: str | None = ...,
) -> Offloading: ...


@called_as("with kedge.offload(model, to=kedge.Disk()): loss_fn(model(x), y).backward()")
def offload(
    model: nn.Module | None = None,
    where: str = EVERYTHING,
    *,
    to: Destination = _REBUILD,
    min_bytes: str | int = 65536,
    codec: str | None = None,
    max_memory: str | int | None = None,
    max_slowdown: float | None = None,
    recompute: str | None = None,
) -> Offload | Offloading:
    """Reduce the memory of the tensors that autograd saves; gradients stay the same to the last bit.

    Each storage is kept only once, and tensors that can be computed again exactly from other saved
    tensors are not kept. With a destination, the rest is moved there. Parameters, buffers and the
    model's inputs stay where they are::

        with kedge.offload(model, to=kedge.Disk()) as account:
            loss_fn(model(x), y).backward()
        print(account)

    The result is also a module that you can put in the place of a layer, with the same parameters,
    names and class. Each of its calls offloads the tensors that the layer saves: ``model.mlp =
    kedge.offload(model.mlp)``.

    Args:
        model: The model, or a layer. Without one, a context for all tensors that this thread saves;
            buffers and inputs are then moved like other tensors.
        where: A selector of modules: only tensors saved while one of them, and no module inside it,
            is running. ``"**"``: all tensors saved on this thread during the block, and on other
            threads while they call the model.
        to: `kedge.Rebuild`, `kedge.Cpu` or `kedge.Disk`.
        min_bytes: Smaller tensors stay where they are; bytes, or a text such as ``"64 KiB"``.
        codec: ``"bf16"``, ``"fp8"`` or ``"int8"`` store tensors in fewer bits; gradients are then
            close, not equal.
        max_memory: A limit for the memory of saved tensors, in bytes or as ``"2 GB"``; Kedge
            offloads no more than it needs.
        max_slowdown: The factor by which a step may take longer, such as 1.05; Kedge offloads as
            much as fits.
        recompute: A selector of modules, such as ``"blocks.*"``. Their calls keep nothing of what
            they save but their inputs, and backward runs them again, as under
            `torch.utils.checkpoint`.

    Returns:
        A context that returns the account of all saved tensors; with a model also a module in its
        place.

    Raises:
        OffloadError: If an argument is invalid; the message lists the valid ones.
        NoSiteMatched: If `where` or `recompute` selects no module.
        NoSuchCodec: If there is no such codec.
    """
    for given in (model, where):
        if isinstance(given, Destination):
            raise OffloadError(
                f"kedge.offload takes a destination as to=: kedge.offload(model, to={given!r})"
            )
    if not (model is None or isinstance(model, nn.Module)):
        raise OffloadError(
            f"kedge.offload takes a torch.nn.Module, not {described(model)}; "
            "for several models, give torch.nn.ModuleList([...])"
        )
    if isinstance(where, nn.Module):
        raise OffloadError(
            "kedge.offload takes one model, and where= a selector of its modules, "
            f"not a second {type(where).__name__}; "
            "for several models, give torch.nn.ModuleList([...])"
        )

    settings = OffloadSettings(where, to, min_bytes, codec, max_memory, max_slowdown, recompute)
    if model is None:
        return Offloading(None, settings)
    around = Offloading(original(model), settings)
    try:
        return stand_in(Offload, model, around)
    except TypeError as error:
        raise OffloadError(
            f"kedge.offload cannot wrap a {type(model).__name__}: {error}. "
            "Its class keeps state outside of __dict__, in __slots__; "
            "use a block without a model, as in: with kedge.offload():"
        ) from error
