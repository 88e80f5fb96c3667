"""A call, packed to be run again alone: copies of its tensors, and a script for the rest."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kedge.files.atomic_write import new_folder
from kedge.repro.calls import RecordedCall
from kedge.repro.finiteness import counts
from kedge.repro.python_source import SourceWriter, attributes
from kedge.repro.suspects import SuspectCall
from kedge.shown_text import visible
from kedge.sites.leaves import own_part
from kedge.sites.spread import is_whole, type_of
from kedge.torch_internals.module_tables import (
    buffers_in,
    empty_entries,
    modules_in,
    named_modules,
    own_buffers,
    own_children,
    own_parameter,
    own_parameters,
    parameters_in,
)
from kedge.torch_internals.tensors import version_of
from kedge.torch_internals.torchscript import is_training

TENSORS, SCRIPT = "tensors.safetensors", "replay.py"
_MARK = "# -- what was called "
_NEXT = "# -- the tensors, "


class TooLarge(Exception):
    """The tensors of a call exceed the limit."""


@dataclass
class CallPackage:
    """A packed call.

    Attributes:
        suspect: The call, and the value it may have made.
        step: The step.
        limit: Most bytes that its tensors may take.
        tensors: The tensors, copied to the CPU.
        notes: Remarks for the reader of the script.
        script: The text of ``replay.py``.
        seen: How many NaN and infinities, and how many elements, the first non-finite value had.
        size: Bytes of the tensors so far.
    """

    suspect: SuspectCall
    step: int
    limit: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    script: str = ""
    seen: dict[str, int] = field(default_factory=dict)
    size: int = 0
    _names: dict[int, str] = field(default_factory=dict)
    _kept: list[Tensor] = field(default_factory=list)

    def pack(self, call: RecordedCall) -> None:
        """Copy the tensors of a call, and write its script.

        Raises:
            TooLarge: The tensors exceed the limit.
        """
        tied = self._state(call)
        self._inputs(call)
        for device, state in call.state.random.items():
            self._add(f"random.{device}", state)
        if self.suspect.direction == "backward":
            for name, gradient in call.gradients.arrived.items():
                self._add(f"grad.{name}", gradient.tensor)
        self._note(call)
        if self.suspect.seen is not None:
            self.seen = counts(self.suspect.seen)
        self.script = _script(self, call, tied)
        self._names = {}
        self._kept = []

    def write(self, folder: Path) -> None:
        """Write the files, atomically: the folder has all of them or does not exist."""
        about = {
            "site": visible(self.suspect.site),
            "step": str(self.step),
            "notes": json.dumps(self.notes),
            "seen": json.dumps(self.seen),
        }
        with new_folder(folder) as place:
            save_file(self.tensors, place / TENSORS, metadata=about)
            (place / SCRIPT).write_text(self.script, encoding="utf-8")

    def attribute(self, value: Tensor) -> None:
        """Save a tensor found in a module's attribute."""
        name = f"attribute.{sum(n.startswith('attribute.') for n in self.tensors)}"
        self._kept.append(value)
        if not is_whole(value):
            self._names[id(value)] = 'missing("a tensor that is spread over several ranks")'
            return
        self._names[id(value)] = f"tensor({name!r}{_layout(value)})"
        self._add(name, value)

    def writer(self) -> SourceWriter:
        """Return a writer that knows the tensors of this package."""
        return SourceWriter(self._names, self.attribute)

    def _state(self, call: RecordedCall) -> dict[str, str]:
        """Copy parameters and buffers.

        Returns:
            The further names of those with several, each with the first name.
        """
        tied: dict[str, str] = {}
        first: dict[int, str] = {}
        for path, module in modules_in(call.module).items():
            tables = (("param", own_parameters(module)), ("buffer", own_buffers(module)))
            for kind, table in tables:
                for name, value in table.items():
                    full = f"{path}.{name}" if path else name
                    if value is None:
                        continue
                    if id(value) in first:
                        tied[full] = first[id(value)]
                        continue
                    first[id(value)] = full
                    key = f"{kind}.{full}"
                    self._names[id(value)] = f"TENSORS[{key!r}]"
                    self._add(key, call.state.buffers.get((id(module), name), value))
        return tied

    def _inputs(self, call: RecordedCall) -> None:
        for name, kept in call.state.inputs.items():
            if not kept.intact:
                what = f"{name}, which was changed in place since"
                self._names[id(kept.tensor)] = f"missing({what!r})"
                self.notes.append(
                    f"{name} was changed in place after the call began: its original value is lost"
                )
                continue
            given = f"{name!r}{_layout(kept.tensor)}"
            if kept.graded:
                given += ", graded=True"
            self._names[id(kept.tensor)] = f"tensor({given})"
            self._add(name, kept.tensor)
            if kept.version < 0:
                self.notes.append(
                    f"PyTorch does not count in-place changes of {name}: "
                    "whether it was changed since is unknown"
                )

    def _note(self, call: RecordedCall) -> None:
        for name, version in call.state.versions.items():
            param = own_parameter(call.module, name)
            if param is not None and version_of(param) != version:
                self.notes.append(
                    f"the parameter {name} was changed in place since the call; "
                    "its new value is saved"
                )
        modules = modules_in(call.module).values()
        if not all(_has_copies(call, module) for module in modules if is_training(module)):
            self.notes.append(
                "buffers larger than 1 MiB were not copied before the call; "
                "they have their values from after it"
            )
        if call.began:
            self.notes.append(
                "the call had begun before it was recorded: "
                "whether it changed its inputs in place is unknown"
            )

    def _add(self, name: str, value: Tensor) -> None:
        value = own_part(value.detach())
        self.size += value.nbytes
        if self.size > self.limit:
            raise TooLarge
        self.tensors[name] = copy_on_cpu(value)


def copy_on_cpu(value: Tensor) -> Tensor:
    """Return a copy of a tensor, or of this process's part of it, in the CPU's memory and to itself."""
    own = own_part(value.detach())
    return torch.empty(own.shape, dtype=own.dtype, device="cpu").copy_(own)


class SuspectPackages:
    """The packages of suspects.

    Args:
        limit: Most bytes that the tensors of one may take.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._packages: dict[int, CallPackage] = {}

    def add(self, suspect: SuspectCall) -> None:
        """Pack a suspect, if its inputs are known; if it is too large, the suspect says so."""
        call = suspect.call
        if call is None or call.state.args is None:
            return
        model = call.label or "the model"
        for name, value in _tensors_of(call):
            if not is_whole(value):
                suspect.why = (
                    f"{model} computes with {name}, of which this rank has only its part; "
                    "run the program in one process to keep the call"
                )
                return
        package = CallPackage(suspect, suspect.step, self._limit)
        try:
            package.pack(call)
        except TooLarge:
            limit = f"{self._limit / 2**30:.3g} GiB"
            suspect.why = f"the inputs and parameters of {model} exceed the limit of {limit}"
        else:
            self._packages[id(suspect)] = package

    def of(self, suspect: SuspectCall) -> CallPackage | None:
        """Return the package of a suspect; None if there is none."""
        return self._packages.get(id(suspect))

    def keep_only(self, suspects: Iterable[SuspectCall]) -> None:
        """Drop the packages of all others."""
        kept = {id(suspect) for suspect in suspects}
        self._packages = {key: package for key, package in self._packages.items() if key in kept}


def _tensors_of(call: RecordedCall) -> Iterator[tuple[str, Tensor]]:
    for name, kept in call.state.inputs.items():
        yield name, kept.tensor
    yield from parameters_in(call.module).items()
    yield from buffers_in(call.module).items()
    for name, kept in call.gradients.arrived.items():
        yield f"the gradient of its output {name}".rstrip(), kept.tensor


def _has_copies(call: RecordedCall, module: nn.Module) -> bool:
    """Whether all own buffers of a module were copied before a call."""
    own = own_buffers(module)
    copies = call.state.buffers
    return all((id(module), name) in copies for name in own if own[name] is not None)


def _layout(value: Tensor) -> str:
    value = own_part(value)
    if value.is_contiguous():
        return ""
    return f", {tuple(value.stride())}"


def _script(package: CallPackage, call: RecordedCall, tied: Mapping[str, str]) -> str:
    """Return the script: its head, the call, and the text of ``script.py``."""
    text = Path(__file__).with_name("script.py").read_text(encoding="utf-8")
    head = text.split(_MARK)[0]
    imports = head[head.index("from __future__") :]
    rest = text[text.index(_NEXT) :]
    docstring = _docstring(package, call)
    called = _called(package, call, tied)
    return f"{docstring}\n\n{imports}{_MARK}{'-' * 71}\n\n{called}\n\n{rest}"


def _docstring(package: CallPackage, call: RecordedCall) -> str:
    suspect = package.suspect
    what = _in_docstring(f"{call.label or 'the model'} ({type_of(call.module).__name__})")
    return (
        f'"""Run {what} again as at step {package.step}, '
        f"where its {suspect.direction} made the first {suspect.value}.\n\n"
        "    python replay.py [DEVICE]\n\n"
        "It needs torch, safetensors, and what the module's own code imports. "
        "It names the first operation whose\n"
        "result is not finite; the exit status is 0 if there was one.\n"
        '"""'
    )


def _in_docstring(text: str) -> str:
    """Return the source of a text inside a docstring: it neither ends it nor begins an escape."""
    return visible(text.replace("\\", "\\\\").replace('"', '\\"'))


def _called(package: CallPackage, call: RecordedCall, tied: Mapping[str, str]) -> str:
    writer = package.writer()
    rows, shared = _modules(call.module, writer)
    args, kwargs = call.state.args or ((), {})
    given = f"{writer.write(tuple(args))}, {writer.write(dict(kwargs))}"
    params = parameters_in(call.module)
    frozen = [name for name, param in params.items() if not param.requires_grad]
    folders, script = _places(call.module)

    used = [kept.tensor for kept in call.state.inputs.values()]
    used += params.values()
    devices = [value.device for value in used if value.device.type != "cpu"]
    device = next(iter(devices), "cpu")
    surroundings = call.state.surroundings
    autocast = ", ".join(f'"{kind}": {dtype}' for kind, dtype in surroundings.autocast.items())
    direction = package.suspect.direction
    return (
        "SITE, STEP, DIRECTION, DEVICE = "
        f'{call.label!r}, {package.step}, "{direction}", "{device}"\n'
        f"NOTES: list[str] = {_lines(package.notes)}\n"
        f"FOLDERS: list[str] = {folders!r}\n"
        f"SCRIPT = {script!r}\n"
        f"SHARED: dict[str, str] = {shared!r}\n"
        f"TIED: dict[str, str] = {dict(tied)!r}\n"
        f"FROZEN: list[str] = {frozen!r}\n"
        f"AUTOCAST: dict[str, torch.dtype] = {{{autocast}}}\n"
        f"GRAD = {surroundings.grad}\n\n\n"
        "def modules() -> list[tuple[str, str, str, bool, Any, list[str]]]:\n"
        '    """Return the modules to rebuild.\n\n'
        "    Each has its name, class, training flag and attributes, "
        "and the entries filled later or None.\n"
        '    """\n'
        f"    return [\n{rows}    ]\n\n\n"
        "def arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:\n"
        '    """Return the arguments of the call, by position and by name."""\n'
        f"    return {given}\n\n"
    )


def _modules(root: nn.Module, writer: SourceWriter) -> tuple[str, dict[str, str]]:
    """Return a row for each module, and the further names of shared ones with the first name."""
    named = named_modules(root)
    rows = ""
    shared: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, module in named.items():
        if id(module) in first:
            shared[name] = first[id(module)]
            continue
        first[id(module)] = name
        kind = type_of(module)
        source = map(repr, (name, kind.__module__, kind.__qualname__, is_training(module)))
        own = ", ".join(f"{n!r}: {writer.write(v)}" for n, v in attributes(module).items())
        rows += f"        ({', '.join(source)}, {{{own}}}, {_entries(module)!r}),\n"

    # A module inside itself has its first name alone among these.
    for name, module in named.items():
        for own, child in own_children(module).items():
            path = f"{name}.{own}".lstrip(".")
            if child is not None and path not in named:
                shared[path] = first[id(child)]
    return rows, shared


def _entries(module: nn.Module) -> list[str]:
    """Return a module's children, in their order, and its parameters and buffers that are None."""
    children = [f"module {name}" for name in own_children(module)]
    return children + [entry for entry in empty_entries(module) if entry not in children]


def _places(root: nn.Module) -> tuple[list[str], str]:
    """Return the folders that the modules' classes are imported from, and the program's script."""
    folders: dict[str, None] = {}
    script = ""
    sources = {type_of(module).__module__ for module in modules_in(root).values()}
    for source in sources:
        file = getattr(sys.modules.get(source), "__file__", None)
        if file is None:
            continue
        if source == "__main__":
            script = str(Path(file).resolve())
            folders[str(Path(script).parent)] = None
        elif "site-packages" not in file:
            folders[str(_above(Path(file).resolve(), source))] = None
    return list(folders), script


def _above(file: Path, module: str) -> Path:
    """Return the folder from which this file is imported as a module of this name."""
    depth = module.count(".") + (file.stem == "__init__")
    return file.parents[depth]


def _lines(texts: list[str]) -> str:
    if not texts:
        return "[]"
    lines = "".join(f"    {text!r},\n" for text in texts)
    return f"[\n{lines}]"
