"""How a distributed tensor, such as a DTensor, is spread over the ranks of a run.

# Note [Spread values]
A rank measures its own part of a distributed value: reading the whole would make the ranks
communicate, at a moment that is not the same for all, and a rank that waits alone waits for ever.
Parts of a sharded value add up to the whole. Ranks along a replicated dimension of the mesh hold
the same elements, which count once. A value that is *partial* is still to be added up over the
ranks: each holds an addend of every element, and only the sum has the statistics of the whole.

The parameters of one model are often on different meshes: tensor parallelism leaves some as
ordinary tensors, and FSDP spreads those over one dimension of the mesh, others over two. All ranks
of the widest mesh belong to one model, so along its other dimensions they hold the same.

# Note [A mesh belongs to the program]
What was found for a mesh is known as long as that mesh exists, and no longer: it holds process
groups, which a program may end and make anew, with other ranks. Two meshes are equal if they have
the same ranks in the same order, and this process may have another place in each; so the place
counts, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, distributed, nn

from kedge.sites.leaves import own_part
from kedge.torch_internals import dynamo


@dataclass(frozen=True)
class Spread:
    """The place of this rank's part of a distributed value; see Note [Spread values].

    Attributes:
        copies: The ranks that hold the same elements, this one among them; of a partial value,
            those that hold addends of the same elements. Empty if this rank is outside of the
            value's mesh and holds nothing of it.
        partial: Whether the value is still to be added up over ranks.
        leads: Whether this rank is the first of them: the one that counts the elements where one
            rank has to.
    """

    copies: tuple[int, ...]
    partial: bool = False
    leads: bool = False


def spread_of(value: Tensor, wide: Any = None) -> Spread | None:
    """Return how a tensor is spread over ranks; None for an ordinary one. Nothing is communicated.

    Args:
        value: The tensor.
        wide: The widest mesh of the parameters of the model whose parameter this is; None for any
            other value.
    """
    mesh, placements = _placed(value)
    if mesh is None and wide is None:
        return None
    first = mesh if mesh is not None else wide
    second = wide if wide is not None else mesh
    key = placements, first.get_coordinate(), second.get_coordinate()
    known = _known.get(first)
    if known is None:
        known = _known[first] = WeakKeyDictionary()
    found = known.setdefault(second, {})
    if key not in found:
        found[key] = _spread_on(mesh, placements, wide)
    return found[key]


def widest_mesh(values: Iterable[Tensor]) -> Any:
    """Return the mesh with the most ranks that one of some tensors is on.

    None if all are ordinary tensors.
    """
    meshes = (mesh for mesh, _ in map(_placed, values) if mesh is not None)
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def counted_once(values: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parts of a model's values that this rank counts, if each element is to count once, and its other parts.

    No rank counts a partial value.
    """
    wide = widest_mesh(values)
    if wide is None:
        return list(values), []
    counted: list[Tensor] = []
    others: list[Tensor] = []
    for value in values:
        spread = spread_of(value, wide)
        counts = spread is not None and spread.leads and not spread.partial
        into = counted if counts else others
        into.append(own_part(value))
    return counted, others


def is_whole(value: Tensor) -> bool:
    """Whether this rank holds all of a value: of a distributed one, each rank of its mesh does, or there is but one."""
    mesh, placements = _placed(value)
    if mesh is None:
        return own_part(value) is value
    return all(
        placement.is_replicate() or ranks == 1
        for placement, ranks in zip(placements, mesh.shape, strict=True)
    )


def gathers(module: nn.Module) -> bool:
    """Whether the parameters of a module are whole only while it runs, as under ``fully_shard``."""
    return isinstance(module, _fsdp_modules())


def type_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module.

    Under ``fully_shard``, which derives one for each module, the one that it was of before.
    """
    derived = _fsdp_modules()
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, derived))


def averaged_over(model: nn.Module) -> Spread | None:
    """Return the ranks that share the gradients of a model in DistributedDataParallel.

    None without it.
    """
    if not distributed.is_available():
        return None
    model = dynamo.unwrap(model)
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return None
    ranks = tuple(sorted(distributed.get_process_group_ranks(model.process_group)))
    return Spread(ranks, leads=distributed.get_rank() == ranks[0])


def _fsdp_modules() -> Any:
    """Return the base of the classes that ``fully_shard`` makes.

    Without it, which is not imported yet, no class.
    """
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


def _placed(value: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Return the mesh of a distributed tensor, and its placement along each dimension.

    Without them no mesh.
    """
    # No DTensor is made before its module is imported.
    loaded = sys.modules.get("torch.distributed.tensor")
    if loaded is None or not isinstance(value, loaded.DTensor):
        return None, ()
    return value.device_mesh, tuple(value.placements)


#: By the mesh of the value and the widest one of its model, or the only one of them; see Note [A
#: mesh belongs to the program].
_OfMesh = WeakKeyDictionary[Any, dict[Any, Spread]]
_known: WeakKeyDictionary[Any, _OfMesh] = WeakKeyDictionary()


def _spread_on(mesh: Any, placements: tuple[Any, ...], wide: Any) -> Spread:
    partial = any(placement.is_partial() for placement in placements)
    shared = [each.is_replicate() or each.is_partial() for each in placements]
    if wide is not None and mesh != wide:
        named: dict[str, bool] = {}
        if mesh is not None:
            named = dict(zip(mesh.mesh_dim_names or (), shared, strict=False))
        inside = set(named) <= set(wide.mesh_dim_names or ())
        if inside and (mesh is None or named):
            mesh = wide
            dimensions = wide.mesh_dim_names or [None] * wide.ndim
            shared = [named.get(name, True) for name in dimensions]

    at = mesh.get_coordinate()
    if at is None:
        return Spread((), partial)
    same: list[Any] = list(at)
    for dimension, is_shared in enumerate(shared):
        if is_shared:
            same[dimension] = slice(None)
    copies = tuple(sorted(mesh.mesh[tuple(same)].reshape(-1).tolist()))
    return Spread(copies, partial, leads=int(mesh.mesh[tuple(at)]) == copies[0])
