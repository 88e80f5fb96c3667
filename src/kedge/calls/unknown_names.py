"""The message for a name that a module of Kedge lacks: what it may stand for."""

import difflib
import sys
from collections.abc import Sequence
from types import ModuleType

_DRAW = 'kedge.figures draws values, as in kedge.figures.feature_maps(acts["conv1"])'
_KEEP = 'values are kept by: with kedge.hook(model, "layer4", kedge.record()) as acts: model(x)'
_MEASURE = 'measured by: with kedge.hook(model, "**", kedge.measure()) as stats: model(x)'
_MEMORY = "print(kedge.saved(model)(x)) lists what autograd keeps, by module"
_NAN = 'to stop at the first one: kedge.hook(model, "**:out", kedge.error_if(kedge.nonfinite))'
_OFFLOAD = "less is kept for backward with: kedge.offload(model, to=kedge.Cpu())"
_READ = 'a recording is read by kedge.Recording.open("run.kedge")'
_REMOVE = "kedge.audit(model).remove() removes the hooks that are on a model"

#: What to use for a name that other tools have, or that is a command; the name without underscores,
#: in small letters.
_MEANT = {
    "activations": _KEEP,
    "cache": _KEEP,
    "checkpoint": _OFFLOAD,
    "clear": _REMOVE,
    "detectanomaly": _NAN,
    "diff": "it is a command of the terminal: kedge diff A B",
    "draw": _DRAW,
    "features": 'features are taken by kedge.extract(model, ["layer4"])(images)',
    "graph": "the autograd graph is drawn by kedge.figures.graph(lambda: model(x), model)",
    "heatmap": _DRAW,
    "isnan": _NAN,
    "load": _READ,
    "memory": _MEMORY,
    "monitor": 'a training is watched by: with kedge.watch("run.kedge"): train()',
    "nan": _NAN,
    "open": _READ,
    "plot": _DRAW,
    "profile": _MEMORY,
    "read": _READ,
    "registerforwardhook": 'a hook of PyTorch is taken by kedge.hook(model, "layer4", kedge.from_hook(f))',
    "registerforwardprehook": 'a hook of PyTorch is taken by kedge.hook(model, "layer4:in", kedge.from_hook(f))',
    "registerfullbackwardhook": 'gradients are hooked by kedge.hook(model, "layer4:out.grad", action)',
    "registerhook": "a tensor is hooked by kedge.hook(tensor, action)",
    "remove": _REMOVE,
    "removehooks": _REMOVE,
    "replay": "it is a command of the terminal: kedge replay run.kedge",
    "report": "it is a command of the terminal: kedge report run.kedge",
    "run": 'it is a command of the terminal: kedge run train.py; in code: with kedge.watch("run.kedge"): train()',
    "runwithcache": _KEEP,
    "saveoncpu": _OFFLOAD,
    "show": _DRAW,
    "statistics": _MEASURE,
    "stats": _MEASURE,
    "summary": "print(kedge.sites(model, x)) lists what each module takes",
    "trace": _KEEP,
}

#: Where a name may be that is not where it is looked for.
_ELSEWHERE = ("recipes", "figures", "rules", "compare", "errors")


def unknown_name(module: str, name: str, known: Sequence[str]) -> str:
    """Return the message for a name that a module lacks, with what may be meant.

    Args:
        module: The module.
        name: The name.
        known: The names of the module.
    """
    text = f"module {module!r} has no attribute {name!r}"
    plain = _plain(name)
    if plain in _MEANT:
        return f"{text}; {_MEANT[plain]}"
    root = sys.modules["kedge"]
    others = {f"kedge.{other}": _public(getattr(root, other)) for other in _ELSEWHERE}
    others["kedge"] = root.__all__
    nearest = {_plain(each): each for each in known}
    for other, names in others.items():
        if other != module:
            for each in names:
                nearest.setdefault(_plain(each), f"{other}.{each}")
    if plain in nearest:
        return f"{text}; did you mean {nearest[plain]}?"
    found = [nearest[each] for each in difflib.get_close_matches(plain, nearest, 3, 0.75)]
    if found:
        return f"{text}; did you mean {' or '.join(found)}?"
    return f"{text}; it has {', '.join(known)}"


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _public(module: ModuleType) -> list[str]:
    """Return the names that a module offers, or those that it defines."""
    if "__dir__" in vars(module):
        return dir(module)
    own = vars(module).items()
    defined = [each for each, value in own if getattr(value, "__module__", "") == module.__name__]
    return getattr(module, "__all__", defined)
