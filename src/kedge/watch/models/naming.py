"""The names of roots: the beginnings of their sites' paths.

# Note [Names of roots]
A model that holds all parameters of the optimizers has the plain names. Where they hold parameters
of several models, each is named after the variable that holds it; see Note [Names of variables] in
`kedge.watch.models.variables`. So are models that are not trained, and those that come after one
with the plain names. A model that no variable holds has the name of its class. A name that is taken
gets a number: the models of a loop are ``model``, ``model_2``, ... Taken are the names of other
roots, also as the beginning of a path, and those at the top of a model with plain names; a variable
named as the recorded losses are is none.

A root is named once, when it is found, and only then are its variables looked for.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from kedge.by_identity import ByIdentity
from kedge.torch_internals.module_tables import parameters_in
from kedge.watch.models.holders import holders_of
from kedge.watch.models.optimizers import living, params_of
from kedge.watch.models.roots import RootModule, free_prefix
from kedge.watch.models.variables import names_in_frames

_LOSS = re.compile(r"loss(_\d+)?")


class RootNames:
    """Names the roots; see Note [Names of roots].

    Attributes:
        given: Names of modules that may become roots, from a model that holds them but is not
            called itself.
    """

    def __init__(self) -> None:
        self.given: ByIdentity[nn.Module, str] = ByIdentity()
        self._one_of_several: weakref.ref[nn.Parameter] | None = None

    def root(
        self, module: nn.Module, types: Mapping[str, str], roots: Sequence[RootModule]
    ) -> RootModule:
        """Return a new root with its name.

        Args:
            module: The root's module.
            types: The class names of those of its modules that belong to no other root.
            roots: The other roots.
        """
        params = parameters_in(module)
        root = RootModule(len(roots), "", dict(types))
        own_params = (path for path in params if "." not in path)
        root.tops = {path.partition(".")[0] for path in (*types, *own_params)} - {""}
        if module in self.given:
            root.prefix = root.variable = self.given[module]
            return root

        variable = names_in_frames([module]).get(id(module))
        if variable is not None and _LOSS.fullmatch(variable) is None:
            root.variable = variable
        are_tops_free = not any(other.prefix.partition(".")[0] in root.tops for other in roots)
        is_first = bool(params) and all(other.prefix for other in roots)
        if not (is_first and are_tops_free and self._is_whole(list(params.values()))):
            root.prefix = free_prefix(root.variable or root.types[""], roots)
        return root

    def _is_whole(self, own: Sequence[nn.Parameter]) -> bool:
        """Whether optimizers, if there are any, train these parameters and those of no other module."""
        # Where `torch.func` has replaced them, an optimizer may hold the original ones.
        if not all(isinstance(param, nn.Parameter) for param in own):
            return True
        ids = {id(param) for param in own}
        known = self._one_of_several and self._one_of_several()
        if known is not None and id(known) not in ids:
            return False  # without a search of all objects for each of many models

        optimizers = living()
        beside = [each for each in optimizers if any(id(p) not in ids for p in params_of(each))]
        if len(names_in_frames(beside)) < len(beside):
            # Those of a training that is over may be garbage.
            optimizers.clear()
            beside.clear()
            gc.collect()
            optimizers = living()
        held, others = _trained(ids, optimizers)
        if not others:
            return True
        if held and not holders_of(others):
            return True  # they are tensors beside the model
        if held:
            self._one_of_several = weakref.ref(held[0])
        return False


def _trained(
    ids: Container[int], optimizers: Iterable[Optimizer]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that optimizers hold: those with these identities, and the others."""
    held = []
    others = []
    for optimizer in optimizers:
        for param in params_of(optimizer):
            if id(param) in ids:
                held.append(param)
            else:
                others.append(param)
    return held, others
