"""A site: one place in a model or a graph where values flow."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

MODULE_KINDS = ("out", "in", "out.grad", "in.grad", "in.share", "saved")
PARAM_KINDS = ("param", "param.grad", "param.acc", "state")
TENSOR_KINDS = ("grad", "acc")
NODE_KINDS = ("pre", "post")
OP_KINDS = ("out", "in", "out.grad", "in.grad")
VARIABLE_KINDS = ("out", "out.grad")
VARIABLE = "="
"""What the name of a variable ends in, where that of an operation may stand: ``block/hidden=``."""
OF_OPERATION = "operation."
"""What the kinds begin with that operations have in recordings, so that nobody takes them for modules'."""
WATCHED_KINDS = ("out", "in", "out.grad", "param", "param.grad", "state")
KINDS = MODULE_KINDS + PARAM_KINDS
ALL_KINDS = KINDS + TENSOR_KINDS + NODE_KINDS
GRADIENT_KINDS = frozenset(
    {
        *("out.grad", "in.grad", "in.share"),
        *("param.grad", "param.acc"),
        *TENSOR_KINDS,
        *NODE_KINDS,
    }
)

#: What a kind is called in other tools, or nearly here.
_SAME_KIND = {
    "activation": "out",
    "activations": "out",
    "output": "out",
    "outputs": "out",
    "input": "in",
    "inputs": "in",
    "grad_output": "out.grad",
    "grad_input": "in.grad",
    "output.grad": "out.grad",
    "input.grad": "in.grad",
    "gradient": "grad",
    "gradients": "grad",
    "data": "param",
    "value": "param",
}

_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_SPECIAL = re.compile(r"([\\*?\[\]{}#/:,!\s])")


def kind_called(word: str, *, of_parameter: bool = False) -> str | None:
    """Return the kind of sites of models that a word means, such as ``out.grad`` for ``gradient``.

    None if it means none.

    Args:
        word: The word.
        of_parameter: Whether it is said of a parameter, so that its gradient is ``param.grad``.
    """
    kind = _SAME_KIND.get(word, word)
    if kind in TENSOR_KINDS and of_parameter:
        return f"param.{kind}"
    if kind == "grad":
        return "out.grad"
    return kind if kind in KINDS else None


def escape(path: str) -> str:
    """Return a path with backslashes before the characters that the site language uses."""
    return _SPECIAL.sub(r"\\\1", path)


def unescape(text: str) -> str:
    """Return the path that a text of the site language stands for; the reverse of `escape`."""
    return _ESCAPED.sub(r"\1", text)


def op_text(op: tuple[str, int | None] | None) -> str:
    """Return the text of an operation after a module's path: ``/relu#1``.

    Empty for none.
    """
    if op is None:
        return ""
    name, number = op
    if number is None:
        return f"/{name}"
    return f"/{name}#{number}"


@dataclass(frozen=True, slots=True)
class Site:
    """One place where values flow.

    Attributes:
        path: PyTorch's qualified name of the module or parameter; empty for the root.
        kind: The kind of values there, one of `KINDS`, `TENSOR_KINDS` or `NODE_KINDS`.
        leaf: The leaf of a structured value ("0", "logits", "cache.1"); None for all.
        call: The number of the module's call within one forward; None for all.
        op: An operation inside the module's own forward, or a variable of it: its name, and its
            number among those of that name within the call, None for all; None for the module
            itself.
    """

    path: str
    kind: str = "out"
    leaf: str | None = None
    call: int | None = None
    op: tuple[str, int | None] | None = None

    def __str__(self) -> str:
        """The site in the site language."""
        call = "" if self.call is None else f"#{self.call}"
        leaf = "" if not self.leaf else f"[{self.leaf}]"
        return f"{escape(self.path)}{call}{op_text(self.op)}:{self.kind}{leaf}"

    @property
    def is_gradient(self) -> bool:
        """Whether it fires in a backward pass."""
        return self.kind in GRADIENT_KINDS

    def moved(self, path: str) -> Site:
        """Return this site at another path.

        Itself if that is its own: a model has thousands of sites.
        """
        if path == self.path:
            return self
        return replace(self, path=path)

    def at(self, leaf: str | None = None, call: int | None = None) -> Site:
        """Return this site narrowed to a leaf or a call."""
        if leaf is None:
            leaf = self.leaf
        if call is None:
            call = self.call
        return replace(self, leaf=leaf, call=call)


def short(site: Site) -> str:
    """Return a site's text without its kind if that is the usual one: ``out`` of a module, ``grad`` of a tensor."""
    text = str(site)
    return text.removesuffix(":out").removesuffix(":grad") or text
