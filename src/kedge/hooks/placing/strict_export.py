"""Global module hooks while `torch.export` traces a model with Dynamo.

# Note [Strict export]
If there is any global module hook, `torch.export.export(strict=True)` traces the call of a module
of its own, not only its forward, and Dynamo refuses to: the program ends with an error. It
registers the exported model in that module, and a registration hook sees this. So Kedge removes its
global hooks then, until PyTorch's module is deleted, which can take until the next garbage
collection; a watch has them back at the end of its step, too. What Dynamo traces is no call of the
program. A model that is called for the first time before they are back is found at a later call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from kedge.hooks.placing.installed import HooksTogether
from kedge.torch_internals.dynamo import is_export_wrapper


def spare_export(hooks: HooksTogether) -> Callable[[], None]:
    """Remove global module hooks during each strict export; returns the undo.

    See Note [Strict export].
    """

    def registered(parent: nn.Module, name: str, module: Any) -> None:
        if is_export_wrapper(parent) and not hooks.are_out:
            hooks.out()
            weakref.finalize(parent, hooks.back).atexit = False

    handle = register_module_module_registration_hook(registered)
    undo: Callable[[], None] = handle.remove
    return undo
