"""What a selector that matches nothing was probably meant to be: the end of its error's message."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional

from kedge.calls.arguments import described
from kedge.sites.language import Term
from kedge.sites.site import (
    ALL_KINDS,
    MODULE_KINDS,
    OP_KINDS,
    PARAM_KINDS,
    TENSOR_KINDS,
    escape,
    kind_called,
)
from kedge.torch_internals.module_tables import named_modules
from kedge.torch_internals.torchscript import class_name, is_frozen, whole_around


def remedy_at(path: str, model: nn.Module) -> str:
    """Return what to do where TorchScript runs a module of a model, and so calls no hooks."""
    remedy = "hook the model before torch.jit.script or torch.jit.trace takes it"
    whole = whole_around(path, named_modules(model))
    if whole is None:
        return remedy
    return f'{remedy}, or hook the traced model as a whole, at "{escape(whole)}:out"'


def nearest(
    term: Term, modules: Mapping[str, nn.Module], params: Collection[str], called: Sequence[str]
) -> str:
    """Return what to write instead of a term: with a colon, with braces or a slash, or another path.

    Args:
        term: The term, which selects nothing.
        modules: The modules of the model, by path.
        params: The paths of its parameters.
        called: The paths of the modules that have a forward of their own.
    """
    frozen = _within_frozen(term, modules)
    if frozen is not None:
        name = f'"{frozen}"' if frozen else "the model"
        return (
            f"torch.jit.freeze has made {name} one program, without modules and parameters; "
            "hook the model before it is scripted or traced"
        )
    if term.types:
        return _other_types(term, modules)
    with_colon = _with_colon(term, modules, params)
    if with_colon:
        return with_colon

    advice = []
    with_braces = _with_braces(term, modules)
    if with_braces:
        advice.append(f'modules of this type are selected by "{with_braces}"')
    owned = _parameters_so_called(term, params)
    if owned:
        advice.append(f"parameters have a kind: {owned}")
    paths = _near_paths(term, called, params, anyhow=not advice)
    if paths or not advice:
        advice.append(f"the nearest paths are {paths or 'none: it is empty'}")
    operation = _as_operation(term, modules)
    if operation:
        advice.append(f'a function that a forward calls has a slash before it: "{operation}"')
    return "; ".join(advice)


def kind_of_no_model(term: Term, params: Collection[str], instead: str) -> str:
    """Return the message for a term with a kind that belongs to tensors or to nodes.

    Args:
        term: The term.
        params: The paths of the model's parameters.
        instead: What models have, or where the kind is taken.
    """
    text = f'"{term}": :{term.kind} belongs to tensors and nodes; {instead}'
    if term.kind not in TENSOR_KINDS:
        return text
    kind = "out.grad"
    if term.literal in params or term.kind == "acc":
        kind = f"param.{term.kind}"
    return f'{text}; did you mean "{replace(term, kind=kind)}"?'


def not_a_selector(given: Sequence[object]) -> str:
    """Return the message for what stands where the texts of selectors belong: for one or several arguments.

    Classes of modules are written as the site language has them.
    """
    classes = [one.__name__ for one in given if isinstance(one, type)]
    advice = ""
    if all(map(is_type_of_modules, given)):
        advice = f'; modules of a type are selected by "**{{{",".join(classes)}}}"'
    elif isinstance(given[0], nn.Module):
        advice = "; print(kedge.sites(model)) lists the paths of its modules"
    return f'{described(given[0])} is not the text of a selector, such as "layer4"{advice}'


def is_type_of_modules(given: object) -> bool:
    """Whether an argument is a class of modules, as `nn.ReLU` is."""
    return isinstance(given, type) and issubclass(given, nn.Module)


def _within_frozen(term: Term, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the path of the frozen module that a literal path is inside of; None without one."""
    if term.literal is None:
        return None
    names = term.literal.split(".")
    around = (".".join(names[:end]) for end in range(len(names)))
    return next((path for path in around if is_frozen(modules.get(path))), None)


def _other_types(term: Term, modules: Mapping[str, nn.Module]) -> str:
    """Return the types that there are, or the term with the one that it nearly names."""
    types = _types_in(modules)
    meant = [_type_called(name, types) for name in term.types]
    if all(meant):
        named = replace(term, types=tuple(name for name in meant if name))
        corrected = _with_a_path_that_fits(named, modules)
        return f'did you mean "{corrected}"?'
    return f"its modules are of types {', '.join(types)}"


def _types_in(modules: Mapping[str, nn.Module]) -> list[str]:
    return sorted(set(map(class_name, modules.values())))


def _with_a_path_that_fits(term: Term, modules: Mapping[str, nn.Module]) -> Term:
    """Return a term of types, with ``**`` in place of a path under which there are none of them."""
    for path, module in modules.items():
        if term.matches(path, (class_name(module),)):
            return term
    return replace(term, path=("**",))


def _type_called(name: str, types: Iterable[str]) -> str | None:
    """Return the type that is meant by a name, whatever its module and its capital letters."""
    plain = name.rpartition(".")[2].lower()
    return next((each for each in types if each.lower() == plain), None)


def _with_colon(
    term: Term, modules: Mapping[str, nn.Module], params: Collection[str]
) -> str | None:
    """Return the advice for a kind with a dot before it, as in ``"1.grad"``; None if it has none."""
    if term.kind is not None or term.op is not None:
        return None
    for end in range(1, len(term.path)):
        head = replace(term, path=term.path[:end])
        word = ".".join(term.path[end:])
        path = head.literal
        of_parameter = path in params
        kind = kind_called(word, of_parameter=of_parameter)
        if kind is None:
            continue
        has: tuple[str, ...] = MODULE_KINDS
        if of_parameter:
            has = PARAM_KINDS
        known = path is None or path in modules or of_parameter
        if known and kind in has:
            return f'the kind of a value follows a colon: "{replace(head, kind=kind)}"'
        near = difflib.get_close_matches(path or "", params, 1, 0.6)
        if near and word in (*ALL_KINDS, "gradient"):
            like = f"{escape(near[0])}:{kind_called(word, of_parameter=True)}"
            return f'the kind of a value follows a colon, and the nearest is "{like}"'
    return None


def _with_braces(term: Term, modules: Mapping[str, nn.Module]) -> Term | None:
    """Return the term that selects modules by the type that stands in the place of a path; None if none does."""
    *before, last = term.path or ("",)
    name = _type_called(last, _types_in(modules))
    if name is None or term.op is not None or term.kind in PARAM_KINDS:
        return None
    if before[-1:] != ["**"]:
        before = [*before, "**"]
    typed = replace(term, path=tuple(before), types=(name,))
    return _with_a_path_that_fits(typed, modules)


def _parameters_so_called(term: Term, params: Collection[str]) -> str | None:
    """Return how to select the parameters of a name such as ``weight``, which is given without their path."""
    if len(term.path) != 1 or term.kind is not None or term.op is not None:
        return None
    name = term.literal
    if not any(path.rpartition(".")[2] == name for path in params):
        return None
    return f'"**.{name}:param", "**.{name}:param.grad"'


def _near_paths(term: Term, called: Sequence[str], params: Collection[str], *, anyhow: bool) -> str:
    """Return the paths that look most like a term's.

    Args:
        term: The term.
        called: The paths of modules.
        params: The paths of parameters.
        anyhow: Whether to return the first ones if none looks like it.
    """
    known = [*called]
    if term.kind in PARAM_KINDS:
        known = [*params]
    known = [path for path in known if path] or known  # the root has no path to speak of
    plain = re.sub(r"[*?\\]", "", ".".join(term.path)).strip(".")
    near = difflib.get_close_matches(plain, known, 3, 0.3)
    if not near and anyhow:
        near = known[:3]
    return ", ".join(f'"{path}"' for path in near)


def _as_operation(term: Term, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the operation that is meant, if a path ends in the name of a function of PyTorch."""
    parent, _, name = (term.literal or "").rpartition(".")
    if term.kind not in (None, *OP_KINDS) or term.op is not None or parent not in modules:
        return None
    found = (getattr(owner, name, None) for owner in (functional, Tensor))
    if not any(map(callable, found)):
        return None
    return f"{escape(parent)}/{name}"
