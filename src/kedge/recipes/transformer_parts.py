"""The same names for the parts of every transformer: its blocks, attentions, MLPs, final norm and embeddings.

# Note [How the parts are found]
The blocks are the only list of modules of one class that have modules of their own, outside of
other such lists. One forward shows in which order modules are called and which part of an output is
the hidden state. What runs after the last block is the tail: the final norm stands there before the
module that makes the scores. Names of attributes decide nothing; of classes, only "Attention" and
"Norm" are read. What cannot be told is an error when it is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kedge import notebook
from kedge.calls.arguments import called_as, not_a_model
from kedge.errors import NoSiteMatched
from kedge.flow import Event
from kedge.hooks.session import session
from kedge.recipes.model_run import preserved_state, run
from kedge.torch_internals.module_tables import modules_in

_ATTENTION = re.compile(r"Attention|Attn")
_NORM = re.compile(r"Norm")


@dataclass(frozen=True)
class PassedValue:
    """One value that a forward passed to a module, or got from it.

    Attributes:
        path: The path of the module.
        call: The number of its call.
        kind: "in" or "out".
        text: The selector of the value.
        width: The size of its last dimension; 0 if it is not a floating-point value.
    """

    path: str
    call: int
    kind: str
    text: str
    width: int


class Forward:
    """The order of the calls of one forward.

    Attributes:
        passed: The values, in their order.
        output: What the model returned.
    """

    def __init__(self, model: nn.Module, given: Any) -> None:
        self.passed: list[PassedValue] = []
        with preserved_state(model), torch.no_grad(), session() as s:
            s.hook(model, "**:in, **:out", self._note)
            self.output = run(model, given)
            s.end(quiet=True)

    def _note(self, value: Tensor, event: Event) -> None:
        site = event.site
        width = 0
        if value.is_floating_point() and value.dim():
            width = value.shape[-1]
        self.passed.append(PassedValue(site.path, event.call, site.kind, str(site), width))

    def calls(self, paths: Iterable[str]) -> list[tuple[int, int]]:
        """Return the first and the last index of each call of some modules, in their order."""
        wanted = set(paths)
        spans: dict[tuple[str, int], list[int]] = {}
        for i, one in enumerate(self.passed):
            if one.path in wanted:
                spans.setdefault((one.path, one.call), []).append(i)
        return sorted((found[0], found[-1]) for found in spans.values())

    def result(self, first: int, last: int, path: str, *, several: bool) -> PassedValue | None:
        """Return the first floating-point output of a module between two indices; None without one.

        Args:
            first: The first index.
            last: The last index.
            path: The path of the module.
            several: Whether the selector names the call, as the module has several.
        """
        for one in self.passed[first : last + 1]:
            if one.path == path and one.kind == "out" and one.width:
                if not several:
                    return one
                head, colon, tail = one.text.partition(":")
                text = f"{head}#{one.call}{colon}{tail}"
                return PassedValue(one.path, one.call, one.kind, text, one.width)
        return None

    def outermost(self, first: int, last: int, around: Sequence[str]) -> list[str]:
        """Return the modules that were called between two indices, without those inside of them.

        Args:
            first: The first index.
            last: The last index.
            around: The modules whose calls were under way.
        """
        found: list[str] = []
        for one in self.passed[first : last + 1]:
            inside = any(is_inside(one.path, path) for path in found)
            if not inside and one.path not in around:
                found = [path for path in found if not is_inside(path, one.path)]
                found.append(one.path)
        return found


def is_inside(path: str, outer: str) -> bool:
    """Whether a module is another one, or inside it."""
    return path == outer or not outer or path.startswith(f"{outer}.")


class Blocks(notebook.Printed):
    """The selectors of a transformer's parts, under the same names for every architecture.

    Attributes:
        model: The name of the model's class.
        layers: The hidden state after each block.
        tail: The paths of the modules that make the model's output of the last of these.
    """

    def __init__(self, model: nn.Module, forward: Forward, inside: str) -> None:
        self.model = type(model).__name__
        self._modules = modules_in(model)
        self._paths = {id(module): path for path, module in self._modules.items()}
        self._forward = forward
        elements = self._elements(inside)
        spans = forward.calls(elements)
        several = len(spans) > len(elements)
        layers: list[str] = []
        attentions: list[str] = []
        mlps: list[str] = []
        for first, last in spans:
            path = forward.passed[first].path
            result = forward.result(first, last, path, several=several)
            if result is None:
                raise NoSiteMatched(
                    f"the block {path} of {self.model} returned no floating-point tensor; "
                    "hook the site that you mean by its own name"
                )
            layers.append(result.text)
            attention = self._attention(path, first, last, result.width)
            mlp = self._mlp(path, first, last, result.width, attention)
            for module, texts in ((attention, attentions), (mlp, mlps)):
                shown = module and forward.result(first, last, module, several=several)
                texts.append(shown.text if shown else "")

        self.layers = tuple(layers)
        self._attentions = tuple(attentions)
        self._mlps = tuple(mlps)
        self._last_block = forward.passed[spans[-1][0]].path
        around = [path for path in self._modules if is_inside(elements[0], path)]
        self.tail = tuple(forward.outermost(spans[-1][1] + 1, len(forward.passed), around))

    def _elements(self, inside: str) -> list[str]:
        """Return the paths of the blocks.

        Raises:
            NoSiteMatched: If there are no blocks, or several lists of them.
        """
        called = {one.path for one in self._forward.passed}
        found: dict[str, list[str]] = {}
        for path, module in self._modules.items():
            children = list(module.children())
            listed = isinstance(module, (nn.ModuleList, nn.Sequential)) and bool(children)
            alike = len({type(child) for child in children}) == 1
            nested = any(is_inside(path, element) for each in found.values() for element in each)
            if not listed or not alike or nested or not is_inside(path, inside):
                continue
            elements = [self._paths[id(child)] for child in children]
            own = all(any(True for _ in child.children()) for child in children)
            if own and called.issuperset(elements):
                found[path] = elements

        if len(found) == 1:
            return next(iter(found.values()))
        place = self.model
        if inside:
            place = f"{inside} of {self.model}"
        if found:
            lists = ", ".join(f'"{path}" ({len(each)})' for path, each in found.items())
            raise NoSiteMatched(
                f"{place} has several lists of blocks: {lists}; "
                "name one with inside=, or a module around it"
            )
        raise NoSiteMatched(
            f"{place} has no list of blocks of one class that its forward calls; "
            "hook its parts by their own names, which print(kedge.sites(model)) shows"
        )

    def _attention(self, block: str, first: int, last: int, width: int) -> str:
        """Return the path of the first attention of a block; empty if it cannot be told."""
        for path in self._called(block, first, last):
            module = self._modules[path]
            if not _ATTENTION.search(type(module).__name__):
                continue
            if not self._normalizes(path, width):
                return path
            # It adds and normalizes, too: the attention is inside, if no other weights are.
            inner = [
                one
                for one in self._called(path, first, last)
                if _ATTENTION.search(type(self._modules[one]).__name__)
            ]
            if len(inner) == 1 and self._holds_all(path, inner[0], width):
                return inner[0]
            return ""
        return ""

    def _mlp(self, block: str, first: int, last: int, width: int, attention: str) -> str:
        """Return the path of the MLP of a block; empty if it cannot be told."""
        if not attention:
            return ""
        weighty = [path for path in self._called(block, first, last) if self._has_weights(path)]
        rest = [
            path
            for path in weighty
            if not _ATTENTION.search(type(self._modules[path]).__name__)
            and not is_inside(attention, path)
        ]
        if rest and all(isinstance(self._modules[path], nn.Linear) for path in rest):
            return rest[-1]
        if len(rest) != 1:
            return ""
        if not self._normalizes(rest[0], width):
            return rest[0]
        inner = [one for one in self._called(rest[0], first, last) if self._has_weights(one)]
        if len(inner) == 1 and self._holds_all(rest[0], inner[0], width):
            return inner[0]
        return ""

    def _called(self, outer: str, first: int, last: int) -> list[str]:
        """Return the outermost modules that were called inside a module, past lists of modules."""
        around = [path for path in self._modules if is_inside(outer, path)]
        found = self._forward.outermost(first, last, around)
        return [path for path in found if is_inside(path, outer)]

    def _has_weights(self, path: str) -> bool:
        return any(weight.dim() > 1 for weight in self._modules[path].parameters())

    def _normalizes(self, path: str, width: int) -> bool:
        """Whether a module normalizes the hidden state inside."""
        inside = self._modules[path].modules()
        norms = [one for one in inside if _NORM.search(type(one).__name__)]
        return any(weight.numel() == width for one in norms for weight in one.parameters())

    def _holds_all(self, outer: str, inner: str, width: int) -> bool:
        """Whether a module holds all weights of another one around it, but for norms."""
        own = {id(weight) for weight in self._modules[inner].parameters()}
        weights = [weight for weight in self._modules[outer].parameters() if weight.dim() > 1]
        return all(id(weight) in own for weight in weights)

    @property
    def attentions(self) -> tuple[str, ...]:
        """The output of the attention of each block."""
        return self._told("attention", self._attentions)

    @property
    def mlps(self) -> tuple[str, ...]:
        """The output of the MLP of each block."""
        return self._told("MLP", self._mlps)

    def _told(self, what: str, found: tuple[str, ...]) -> tuple[str, ...]:
        if all(found):
            return found
        i = found.index("")
        first, last = self._forward.calls([self._block(i)])[0]
        inside = ", ".join(self._called(self._block(i), first, last))
        raise NoSiteMatched(
            f"which module of block {i} of {self.model} is its {what} alone cannot be told; "
            f"it calls {inside}; select the one that you mean by its name"
        )

    def _block(self, i: int) -> str:
        return self.layers[i].partition(":")[0].partition("#")[0]

    @property
    def embedding(self) -> str:
        """The output of the embedding of the inputs."""
        get = getattr(self._modules[""], "get_input_embeddings", None)
        module = None
        if get is not None:
            module = get()
        called = [one.path for one in self._forward.passed]
        path = self._paths.get(id(module), "")
        if not path or path not in called:
            embeddings = [p for p in called if isinstance(self._modules[p], nn.Embedding)]
            path = next(iter(embeddings), "")
        return self._part("embedding", path)

    @property
    def norm(self) -> str:
        """The output of the final norm."""
        norms = [path for path in self.tail if _NORM.search(type(self._modules[path]).__name__)]
        return self._part("final norm", next(reversed(norms), ""))

    @property
    def unembedding(self) -> str:
        """The output of the output embedding, or of another last module."""
        get = getattr(self._modules[""], "get_output_embeddings", None)
        module = None
        if get is not None:
            module = get()
        path = self._paths.get(id(module), "")
        if not path:
            path = next(reversed(self.tail), "")
        return self._part("output embedding", path)

    def _part(self, what: str, path: str) -> str:
        """Return the selector of a module's output.

        Raises:
            NoSiteMatched: If there is no such module.
        """
        found = None
        if path:
            found = self._forward.result(0, len(self._forward.passed), path, several=False)
        if found is None:
            tail = ", ".join(self.tail) or "nothing"
            raise NoSiteMatched(
                f"{self.model} has no {what} that can be told: after the last block its forward "
                f"calls {tail}; select the site that you mean by its name"
            )
        return found.text

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self.layers)

    def __str__(self) -> str:
        """A line for each name."""
        lines = [f"{self.model}: {len(self)} blocks"]
        lines += [f"{name:12} {text}" for name, text in self._shown()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return notebook.table(("part", "selector"), self._shown(), title=self.model, align="mm")

    def _shown(self) -> list[tuple[str, str]]:
        shown = []
        for name in ("embedding", "layers", "attentions", "mlps", "norm", "unembedding"):
            try:
                found = getattr(self, name)
            except NoSiteMatched:
                continue
            if isinstance(found, tuple):
                shown.append((f"{name}[0]", found[0]))
            else:
                shown.append((name, found))
        return shown


@called_as("recipes.blocks(model, tokens)")
def blocks(model: nn.Module, given: Any, *, inside: str = "") -> Blocks:
    """Return the selectors of a transformer's parts, the same names for every architecture.

    The model runs once, without gradients, to see which modules it calls in which order; it is not
    changed. Selectors are the model's own names.

    Args:
        model: The model.
        given: An input of any content: a tensor, a tuple of arguments, or a dict of keyword
            arguments.
        inside: The path of a module; only blocks inside are looked for. A model with an encoder and
            a decoder needs it.

    Returns:
        The selectors: ``layers[i]``, ``attentions[i]``, ``mlps[i]``, ``embedding``, ``norm`` and
        ``unembedding``.

    Raises:
        NoSiteMatched: If the model has no list of blocks, or several; and when a part is asked for
            that cannot be told.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> gpt = torch.nn.Sequential(torch.nn.Embedding(9, 8), layers, torch.nn.Linear(8, 9)).eval()
        >>> recipes.blocks(gpt, torch.tensor([[1, 4, 2]])).layers
        ('1.layers.0:out', '1.layers.1:out')
    """
    if not isinstance(model, nn.Module):
        raise NoSiteMatched(f"blocks takes a model first, not {not_a_model(model)}")
    return Blocks(model, Forward(model, given), inside)
