"""Stand-ins: modules that take the place of a layer, with the layer's state and class, and with calls of their own.

# Note [Stand-ins]
A stand-in is an object of its own that shares its layer's ``__dict__``: parameters, buffers, inner
modules, hooks, mode and all other attributes. Its class is a subclass of the layer's, of the same
name. So a program that puts it where the layer stood finds the same names in ``state_dict`` and
``named_modules``, and the same ``isinstance``, ``len`` and methods. The layer does not change: its
own calls and pickles are what they were.

A module that had the layer as a child would add its own name to every path. Changing the class of
the layer, as ``fully_shard`` does, would change a program's object, and its calls in other places.

# Note [The class of a stand-in]
The layer's class does not hear of the subclass: its ``__init_subclass__`` may keep a list of layers
by name. Nor does its ``__del__`` run for a stand-in, whose end is not the layer's. A lazy module
replaces its class in its first call; the layer gets that class, too. ``parametrize`` and
``fully_shard`` derive a class from the stand-in's, which the layer cannot have.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, ExitStack
from pickle import PicklingError
from typing import Any, Protocol, Self, TypeVar

from torch import nn

from kedge.torch_internals.module_tables import replica_of

S = TypeVar("S", bound="StandIn")


class CallSurroundings(Protocol):
    """What a stand-in puts around each call.

    It is copied and pickled with the stand-in.
    """

    def call(self) -> AbstractContextManager[Any]:
        """Return a context for one call."""

    def of(self, layer: nn.Module) -> Self:
        """Return the same for another layer."""


class StandIn(nn.Module):
    """A module in the place of a layer; see Note [Stand-ins].

    Make one by `stand_in`.
    """

    __slots__ = ("_kedge_around", "_kedge_layer")
    _kedge_around: Any
    _kedge_layer: nn.Module

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a layer of the layer's class: layers call ``type(self)``, as `nn.Sequential` does for a slice."""
        order = cls.__mro__
        return order[order.index(StandIn) + 1](*args, **kwargs)

    def __init_subclass__(cls, **_: Any) -> None:
        """Do nothing; see Note [The class of a stand-in]."""

    def __del__(self) -> None:
        """Do nothing; see Note [The class of a stand-in]."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer within the surroundings."""
        with ExitStack() as stack:
            layer: nn.Module = self
            while isinstance(layer, StandIn):
                stack.enter_context(layer._kedge_around.call())
                layer = layer._kedge_layer
            return super().__call__(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, as the layer does; see Note [The class of a stand-in]."""
        if name == "__class__" and not issubclass(value, StandIn):
            original(self).__class__ = value
            value = _class_of(_kind_of(self), value)
        super().__setattr__(name, value)

    def __copy__(self) -> StandIn:
        """Return a stand-in for a copy of the layer."""
        layer = copy.copy(self._kedge_layer)
        return _like(self, layer, self._kedge_around.of(original(layer)))

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        """Return a stand-in for a deep copy of the layer."""
        kind = _kind_of(self)
        twin = memo[id(self)] = _blank(
            kind
        )  # known before the layer is copied, which may lead back to it
        layer = copy.deepcopy(self._kedge_layer, memo)
        around = copy.deepcopy(self._kedge_around, memo)
        _place(twin, layer, around)
        object.__setattr__(twin, "__class__", type(self))
        return twin

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """Return the pickled form: the layer's, and what surrounds its calls."""
        kind = _kind_of(self)
        layer = self._kedge_layer
        if type(self) is not _class_of(kind, type(layer)):
            raise PicklingError(
                "this module cannot be pickled, because its class became "
                f"{type(self).__name__} after it had wrapped a "
                f"{type(layer).__name__}; parametrize or shard the layer before you "
                "wrap it, or save the state_dict()"
            )
        return _blank, (kind,), (layer, self._kedge_around)

    def __setstate__(self, state: tuple[nn.Module, CallSurroundings]) -> None:
        """Take the place of an unpickled layer."""
        _place(self, *state)

    def _replicate_for_data_parallel(self) -> Any:
        """Return a replica, as `DataParallel` makes them: what surrounds its calls is the same."""
        return _like(self, replica_of(self._kedge_layer), self._kedge_around)


def stand_in(kind: type[S], layer: nn.Module, around: CallSurroundings) -> S:
    """Return a stand-in for a layer.

    Args:
        kind: The subclass of `StandIn`.
        layer: The layer, which may be a stand-in itself.
        around: Its surroundings.

    Raises:
        TypeError: The layer's class has ``__slots__``, and so state outside of its ``__dict__``.
    """
    made = object.__new__(kind)
    _place(made, layer, around)
    return made


def _like(made: StandIn, layer: nn.Module, around: CallSurroundings) -> StandIn:
    """Return another stand-in of the same class."""
    twin = stand_in(_kind_of(made), layer, around)
    object.__setattr__(twin, "__class__", type(made))
    return twin


def original(module: nn.Module) -> nn.Module:
    """Return the layer behind a stand-in; any other module itself."""
    while isinstance(module, StandIn):
        module = module._kedge_layer
    return module


def layer_of(made: StandIn) -> nn.Module:
    """Return the layer in whose place a stand-in is; it may be one itself."""
    return made._kedge_layer


def around_of(made: StandIn) -> Any:
    """Return the surroundings of a stand-in's calls."""
    return made._kedge_around


def _place(made: StandIn, layer: nn.Module, around: CallSurroundings) -> None:
    object.__setattr__(made, "__class__", _class_of(_kind_of(made), type(layer)))
    object.__setattr__(made, "__dict__", layer.__dict__)
    object.__setattr__(made, "_kedge_layer", layer)
    object.__setattr__(made, "_kedge_around", around)


def _kind_of(made: StandIn) -> type[StandIn]:
    """Return the subclass of `StandIn` that a class was made from."""
    return next(each for each in type(made).__mro__ if StandIn in each.__bases__)


def _class_of(kind: type[StandIn], layer: type[nn.Module]) -> type[StandIn]:
    """Return the class of stand-ins for layers of a class.

    It lives as long as they do.
    """
    if issubclass(layer, kind):
        return layer
    bases = (kind, layer)
    for each in type.__subclasses__(layer):
        if each.__bases__ == bases:
            return each  # type: ignore[return-value]
    own = {
        "__slots__": (),
        "__module__": layer.__module__,
        "__qualname__": layer.__qualname__,
        "__doc__": layer.__doc__,
    }
    meta: Any = type(layer)
    return meta(layer.__name__, bases, own)  # type: ignore[no-any-return]


def _blank(kind: type[StandIn]) -> StandIn:
    """Return a stand-in without a layer yet."""
    return object.__new__(kind)
