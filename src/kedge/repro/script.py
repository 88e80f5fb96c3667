"""Runs one call of one module again, alone, and names its first operation with a non-finite result.

This file is the text of the ``replay.py`` in every dump; the package of the call fills in the part
marked below. It needs torch and safetensors, and can do without Kedge, so that a dump can be run
anywhere. Kedge does not import it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

try:  # with Kedge the nodes inside a reentrant checkpoint are known, too
    from kedge.torch_internals.graph_task import current_node
except ImportError:

    def current_node() -> Any:
        """Return None: the node is unknown."""
        return None


# -- what was called ---------------------------------------------------------------------------

SITE, STEP, DIRECTION, DEVICE = "", 0, "forward", "cpu"
NOTES: list[str] = []
FOLDERS: list[str] = []
SCRIPT = ""
SHARED: dict[str, str] = {}
TIED: dict[str, str] = {}
FROZEN: list[str] = []
AUTOCAST: dict[str, torch.dtype] = {}
GRAD = True


def modules() -> list[tuple[str, str, str, bool, Any, list[str]]]:
    """Return the modules to rebuild.

    Each has its name, class, training flag and attributes, and the entries filled later or None.
    """
    return []


def arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the call, by position and by name."""
    return (), {}


# -- the tensors, and how modules and values are rebuilt -----------------------------------------

HERE = Path(__file__).resolve().parent
TENSORS: dict[str, torch.Tensor] = {}
LACKING: list[str] = []


def tensor(
    name: str, stride: tuple[int, ...] | None = None, *, graded: bool = False
) -> torch.Tensor:
    """Return a saved tensor with its original memory layout."""
    value = TENSORS[name]
    if stride is not None:
        made = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
        value = made.copy_(value)
    if graded:  # a leaf could not be changed in place
        value = value.requires_grad_().clone()
    return value


def missing(what: str) -> Any:
    """Placeholder for a value that could not be written; replace the call with code that makes it."""
    LACKING.append(what)


def imported(module: str, name: str) -> Any:
    """Return an object, imported by its module and name."""
    found: Any = None
    if module == "__main__":
        found = script()
    else:
        found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def revived(kind: Any, attributes: dict[str, Any]) -> Any:
    """Rebuild an object from its class and its attributes."""
    made = kind.__new__(kind)
    vars(made).update(attributes)
    return made


@functools.cache
def script() -> ModuleType:
    """Import the program's own script without running the program.

    Only its imports, definitions and constants are run.
    """
    spec = importlib.util.spec_from_file_location("replayed_script", SCRIPT)
    if spec is None:
        raise SystemExit(
            f"the program's script {SCRIPT} cannot be imported; "
            "give the place of its classes in modules()"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules["replayed_script"] = module
    tree = ast.parse(Path(SCRIPT).read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if is_definition(node)]
    exec(compile(tree, SCRIPT, "exec"), vars(module))  # noqa: S102 - as an import runs it
    return module


def is_definition(node: ast.stmt) -> bool:
    """Whether a statement only defines something and runs nothing."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return not any(isinstance(inner, (ast.Call, ast.Await)) for inner in ast.walk(node))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, (ast.Import, ast.ImportFrom, *functions, ast.ClassDef))


def build() -> nn.Module:
    """Rebuild the module: its classes without their constructors, then their contents."""
    made: dict[str, nn.Module] = {}
    # Filled first, since a class's own code may fail on a module without contents.
    contents: dict[str, nn.Module] = {}
    for name, source, kind, training, attributes, entries in modules():
        cls = imported(source, kind)
        made[name] = cls.__new__(cls)
        contents[name] = nn.Module().train(training)
        vars(made[name]).update(attributes)
        if name:
            put(contents, name, "module", made[name])
        # Entries are None for now; so children are in their order, those that are shared too.
        for entry in entries:
            what, _, own = entry.partition(" ")
            path = f"{name}.{own}" if name else own
            put(contents, path, what, None)
    for name, first in SHARED.items():
        made[name] = made[first]
        contents[name] = contents[first]
        put(contents, name, "module", made[first])

    furnish(contents)
    for name, module in made.items():
        vars(module).update(vars(contents[name]))
    for module in made.values():
        if isinstance(module, nn.RNNBase):
            # It is there already: this rebuilds its list of weights.
            module.to(next(module.parameters()).device)
    return made[""]


def furnish(contents: dict[str, nn.Module]) -> None:
    """Put parameters and buffers into their modules, and share again what several of them shared."""
    placed: dict[str, tuple[str, torch.Tensor]] = {}
    for key, value in TENSORS.items():
        kind, _, path = key.partition(".")
        if kind == "param":
            trained = path not in FROZEN and (value.is_floating_point() or value.is_complex())
            placed[path] = "parameter", nn.Parameter(value, requires_grad=trained)
        elif kind == "buffer":
            placed[path] = "buffer", value
    for path, first in TIED.items():
        placed[path] = placed[first]
    for path, (what, value) in placed.items():
        put(contents, path, what, value)


def put(contents: dict[str, nn.Module], path: str, what: str, value: Any) -> None:
    """Register a parameter, buffer or module, given its path."""
    outer, _, own = path.rpartition(".")
    if what != "module":
        getattr(contents[outer], f"register_{what}")(own, value)
        return
    # `register_module` refuses names of methods, such as `type`, which an assignment allows.
    if value is None:  # which is no module: the name is registered with one first
        setattr(contents[outer], own, nn.Module())
    setattr(contents[outer], own, value)


# -- the check of every operation ----------------------------------------------------------------

_UNSET = (
    "empty",
    "empty_strided",
    "new_empty",
    "empty_like",
    "new_empty_strided",
    "set_",
    "resize_",
)
_INFINITIES = 3


class FirstBadOperations(TorchDispatchMode):
    """Checks the result of every operation.

    It keeps the first few infinities made of finite inputs, and the first NaN.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, str]] = []
        self.ended = False
        self.nodes: dict[int, Any] = {}  # the node that each thread runs

    def follow(self, outputs: list[torch.Tensor]) -> None:
        """Note which node of the graph a backward runs."""
        waiting: list[Any] = [output.grad_fn for output in outputs]
        known: set[Any] = {None}
        while waiting:
            node = waiting.pop()
            if node not in known:
                known.add(node)
                node.register_prehook(functools.partial(self.began, node))
                waiting += [before for before, _ in node.next_functions]

    def began(self, node: Any, gradients: Any) -> None:
        """Called when the backward begins with a node."""
        self.nodes[threading.get_ident()] = node

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if self.ended:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        before = [figures(value) for value in given]
        known = {bad(value) for value in given}
        result = func(*args, **kwargs)
        name = str(func).removeprefix("aten.").partition(".")[0]
        if name in _UNSET:
            return result
        for made in tensors_in(result):
            kind = bad(made)
            if kind and kind not in known:
                self.note(kind, self.described(name, made, before))
                known.add(kind)
        return result

    def note(self, kind: str, text: str) -> None:
        """Keep one result; after the first NaN all others are its consequences."""
        if len(self.found) < _INFINITIES or kind == "nan":
            self.found.append((kind, text))
        self.ended = kind == "nan"

    def described(self, name: str, made: torch.Tensor, before: list[str]) -> str:
        """Describe the result, the inputs and the place of an operation."""
        wrong = int((~made.isfinite()).sum())
        sources = "; ".join(before) or "nothing"
        text = f"{name}: {wrong} of {made.numel()} elements, from {sources}"
        node = current_node() or self.nodes.get(threading.get_ident())
        if node is None:
            place = line(traceback.extract_stack())
            before_place = ", at"
        else:
            place = forward_line(node)
            text += f", in {node.name()}, the backward"
            before_place = " of"
        if place:
            text += f"{before_place}\n{place}"
        return text


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the floating-point and complex tensors in a structure."""
    found: list[torch.Tensor] = []
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            found.append(value)
    elif isinstance(value, dict):
        for part in value.values():
            found += tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            found += tensors_in(part)
    return found


def bad(value: torch.Tensor) -> str:
    """Return "nan" if a tensor holds a NaN, "inf" if only infinities, and "" if all is finite."""
    if value.numel() == 0 or bool(value.isfinite().all()):
        return ""
    if bool(value.isnan().any()):
        return "nan"
    return "inf"


def figures(value: torch.Tensor) -> str:
    """Describe the dtype, shape and range of a tensor."""
    text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if value.numel() == 0 or value.is_complex():
        return text
    finite = value[value.isfinite()].float()
    if finite.numel():
        text += f" in [{finite.min():.4g}, {finite.max():.4g}]"
    if bad(value):
        text += f" and {bad(value)}"
    return text


def line(stack: traceback.StackSummary) -> str:
    """Return the innermost line of a stack that is neither torch's nor this file's, if any."""
    inside = str(Path(torch.__file__).parent)
    mine = Path(__file__).resolve()
    for frame in reversed(stack):
        if frame.filename.startswith((inside, "<")):
            continue
        if Path(frame.filename).resolve() != mine:
            return f"    {frame.filename}:{frame.lineno}, in {frame.name}\n        {frame.line}"
    return ""


def forward_line(node: Any) -> str:
    """Return the line of the forward that made an autograd node, if anomaly mode recorded it."""
    inside = str(Path(torch.__file__).parent)
    mine = str(Path(__file__).resolve())
    for frame in reversed(node.metadata.get("traceback_", [])):
        if f'"{inside}' not in frame and f'"{mine}"' not in frame:
            return str(frame).rstrip()
    return ""


# -- the replay -----------------------------------------------------------------------------------


def run(module: nn.Module, device: str) -> FirstBadOperations:
    """Run the forward, and the backward too if the first bad value arose there."""
    args, kwargs = arguments()
    seen = FirstBadOperations()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.set_grad_enabled(GRAD))
        for kind, dtype in AUTOCAST.items():
            place = kind if device == DEVICE else device
            stack.enter_context(torch.autocast(place, dtype))
        if DIRECTION == "backward":
            stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
        stack.enter_context(seen)
        output = module(*args, **kwargs)
    if DIRECTION == "backward":
        for kind, text in seen.found:
            print(f"{kind} in the forward already: {text}")
        outputs, gradients = paired(output)
        with FirstBadOperations() as seen:
            seen.follow(outputs)
            torch.autograd.backward(outputs, gradients)
    return seen


def paired(output: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs and the gradients that reached them, in the same order."""
    named = dict(leaves(output, ""))
    outputs = []
    gradients = []
    for key, gradient in TENSORS.items():
        if key.startswith("grad."):
            outputs.append(named[key.removeprefix("grad.")])
            gradients.append(gradient)
    return outputs, gradients


def leaves(value: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a structure with their names."""
    if isinstance(value, torch.Tensor):
        return [(name, value)]
    if hasattr(value, "_fields"):
        value = dict(zip(value._fields, value, strict=True))
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, dict):
        value = {field: getattr(value, field) for field in value.__dataclass_fields__}
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not hasattr(value, "items"):
        return []
    found = []
    for key, part in value.items():
        inner = f"{name}.{key}" if name else str(key)
        found += leaves(part, inner)
    return found


def set_random(device: str) -> None:
    """Restore the random number generators of the CPU, and of a device of the original kind."""
    for key, state in TENSORS.items():
        if key == "random.cpu":
            torch.set_rng_state(state.cpu())
        elif key == f"random.{DEVICE}" and kind_of(DEVICE) == kind_of(device):
            generators = torch.get_device_module(device)
            generators.set_rng_state(state.cpu(), torch.device(device))


def kind_of(device: str) -> str:
    """Return the kind of a device, without its number."""
    return device.partition(":")[0]


def is_here(device: str) -> bool:
    """Whether this machine has such a device."""
    there = torch.accelerator.current_accelerator(check_available=True)
    if there is None or there.type != kind_of(device):
        return device == "cpu"
    return int(device.partition(":")[2] or 0) < torch.accelerator.device_count()


def shown(text: str) -> str:
    """Return a text of the program, such as a name, whose control characters can be seen."""
    found = ""
    for character in text:
        if character.isprintable():
            found += character
        else:
            found += character.encode("unicode_escape").decode("ascii")
    return found


def main() -> int:
    """Replay the call; the exit status is 0 if a non-finite value arose again."""
    device = "cpu"
    if len(sys.argv) > 1:
        device = sys.argv[1]
    elif is_here(DEVICE):
        device = DEVICE
    head = f"{shown(SITE) or 'the model'} at step {STEP}, {DIRECTION}, on {device}"
    if device != DEVICE:
        head += f" (it was {DEVICE})"
    print(head)
    for note in NOTES:
        print(f"note: {shown(note)}")

    sys.path += [folder for folder in FOLDERS if folder not in sys.path]
    kept = load_file(HERE / "tensors.safetensors")  # to the CPU: it does not know every device
    for name, value in kept.items():
        TENSORS[name] = value.to(device)
    module = build()
    set_random(device)
    if LACKING:
        print("these values could not be written and are None; look for missing( in this file:")
        for what in LACKING:
            print(f"  {shown(what)}")

    seen = run(module, device)
    for kind, text in seen.found:
        print(f"{_NAMES[kind]} in the {DIRECTION}: {text}")
    if seen.found:
        return 0
    print(
        f"no value was infinite or NaN in the {DIRECTION}: "
        "this call alone does not reproduce it. It depends on something\n"
        "outside of the call, such as a global variable of the program, "
        "or on what the notes above name. Set that in this\n"
        "file; or make it an argument of the module, and run with --dump again."
    )
    return 1


_NAMES = {"inf": "an infinity", "nan": "the first NaN"}

if __name__ == "__main__":
    sys.exit(main())
