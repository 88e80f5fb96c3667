"""The names of operations, and which calls are operations.

# Note [Names of operations]
An operation has the name of the function that a forward calls: ``relu`` for `F.relu`, `torch.relu`
and ``x.relu()`` alike. Operators lose their underscores and the ``r`` of reflected ones (``1 - x``
is a ``sub``), in-place ones end in an underscore (``x += y`` is ``add_``), ``x[i] = v`` is
``setitem``. A property that is a tensor, such as ``x.T``, has its own name. A call that returns no
tensor (``x.size()``, ``x.shape``, ``x.item()``) is not an operation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kedge.sites import leaves

PROPERTIES = frozenset({"T", "H", "mT", "mH", "real", "imag", "data", "grad"})
"""Properties of tensors that are tensors."""

_NUMBERS = frozenset({"bool", "complex", "float", "int"})
_ARITHMETIC = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "matmul", "divmod")
_BITWISE = ("and", "or", "xor", "lshift", "rshift")
_REFLECTED = {f"r{name}": name for name in (*_ARITHMETIC, *_BITWISE)}
_IN_PLACE = {f"i{name}": f"{name}_" for name in (*_ARITHMETIC, *_BITWISE)} | {"setitem": "setitem"}

_WITHOUT_TENSOR = frozenset({
    "size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size", "len",
    "float_", "index", "complex_", "hash", "repr", "str", "format", "dir", "contains", "deepcopy",
    "reduce_ex", "set", "item", "tolist", "numpy", "array", "data_ptr", "storage", "untyped_storage", "get_device",
    "has_names", "iter", "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_same_size",
    "is_set_to", "is_nonzero", "is_shared", "is_pinned", "is_coalesced", "is_inference", "is_neg", "is_conj",
    "is_distributed", "allclose", "equal", "result_type", "can_cast", "register_hook",
    "register_post_accumulate_grad_hook", "retain_grad", "backward", "dim_order", "dlpack", "dlpack_device",
    "sparse_dim", "dense_dim", "q_scale", "qscheme", "delattr", "_is_view", "share_memory_", "requires_grad_",
    "module_load", "cuda_array_interface", "array_priority",
})  # fmt: skip
"""Functions whose result holds no new tensor, by the names that `clean` returns."""


_DISTRIBUTED = "torch.distributed.distributed_c10d"
_COLLECTIVES = {
    "all_gather": (0, "tensor_list"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "all_gather_single": (0, "output"),
    "all_reduce": (0, "tensor"),
    "all_to_all": (0, "output_tensor_list"),
    "all_to_all_single": (0, "output"),
    "broadcast": (0, "tensor"),
    "gather": (1, "gather_list"),
    "recv": (0, "tensor"),
    "reduce": (0, "tensor"),
    "reduce_scatter": (0, "output"),
    "reduce_scatter_single": (0, "output"),
    "reduce_scatter_tensor": (0, "output"),
    "scatter": (0, "tensor"),
}
"""The argument that each collective of `torch.distributed` writes its result into."""
WRITING = frozenset({"setitem", *_COLLECTIVES})
"""The names of operations that may return nothing and write into an argument."""


def name_of(func: Any) -> str:
    """Return the name of a function's operation; empty if it is not an operation.

    See Note [Names of operations].
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":
        of = getattr(func.__self__, "__name__", "")
        return of if of in PROPERTIES else ""
    return clean(name)


@functools.lru_cache(maxsize=4096)
def clean(name: str) -> str:
    """Return the name of an operation, given the function's name.

    Empty if the function is known to return no tensor.
    """
    if name.startswith("__") and name.endswith("__"):
        inner = name[2:-2]
        if inner in _NUMBERS:  # float(x) returns a number, x.float() a tensor
            return ""
        name = _IN_PLACE.get(inner) or _REFLECTED.get(inner, inner)
    name = name.partition(".")[0]  # an overload of an operator: "relu.default"
    return "" if name in _WITHOUT_TENSOR else name


def written_into(
    func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, Any]:
    """Return the argument that an operation which returns nothing writes into, by its name among the arguments.

    ``x[i] = y`` writes into ``x``, a collective into its output. ``("", None)`` for any other.
    """
    if name == "setitem":
        return "0", args[0]
    if name not in _COLLECTIVES or getattr(func, "__module__", "") != _DISTRIBUTED:
        return "", None
    place, argument = _COLLECTIVES[name]
    if len(args) > place:
        return str(place), args[place]
    return argument, kwargs.get(argument)


def overwrites(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, Tensor]]:
    """Return the tensors that a call will change in place, by their names among the arguments."""
    found = []
    in_place = (
        (name.endswith("_") and not name.endswith("__"))
        or name == "setitem"
        or kwargs.get("inplace") is True
    )
    if in_place and args and isinstance(args[0], Tensor):
        found.append(("0", args[0]))
    elif in_place and isinstance(kwargs.get("input"), Tensor):
        found.append(("input", kwargs["input"]))
    return found + (leaves.find(kwargs["out"], "out") if kwargs.get("out") is not None else [])
