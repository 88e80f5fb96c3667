"""What is said of a program of tensors, in a terminal and on a page alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kedge.report.program_line import ProgramLine
from kedge.short_text import counted, sized
from kedge.shown_text import visible
from kedge.store.events import (
    HookFiring,
    TensorGraphEvent,
    TensorHook,
    TensorNode,
    TensorProgramEvent,
    TensorValue,
)
from kedge.store.recording import Recording

_UNTIL = {
    "limit": "a program of numbers is watched only at its beginning, so as not to slow it down",
    "profiler": "nothing is looked at under PyTorch's profiler or torch.jit, nor after it",
    "module": "from the first call of a module on, the modules are watched",
}


def is_of_tensors(recording: Recording) -> bool:
    """Whether a recording is that of a program of tensors alone."""
    has_begun = any(recording.of(TensorProgramEvent))
    return has_begun and not any(root.modules for root in recording.roots)


def graphs_of(recording: Recording) -> tuple[TensorGraphEvent, ...]:
    """Return the graphs of a recording, in the order of their first passes."""
    return tuple(sorted(recording.of(TensorGraphEvent), key=lambda graph: graph.first))


def told_program(recording: Recording) -> str:
    """Return what was seen in a line: ``12 operations, 3 backward passes``."""
    program = next(iter(recording.of(TensorProgramEvent)), None)
    if program is None:
        return ""
    told = counted(program.operations, "operation")
    if program.passes:
        told += f", {program.passes:,} backward {'pass' if program.passes == 1 else 'passes'}"
    if program.graphs:
        told += f"; {counted(program.graphs, 'pass')} not recorded, as too large or too different"
    if program.until in _UNTIL:
        told += f"; {_UNTIL[program.until]}"
    return told


def first_broken(recording: Recording) -> str:
    """Return a sentence on the first value, or gradient, that is not finite; empty if there is none."""
    for graph in graphs_of(recording):
        for place, node in enumerate(graph.nodes):
            if _has_broken(node.value, node.last):
                return f"not finite: {name_of(node, place)}{_at(node)}"
        for place, node in reversed(list(enumerate(graph.nodes))):
            if _has_broken(node.gradient, node.last_gradient, node.kept):
                return f"not finite: the gradient of {name_of(node, place)}{_at(node)}"
    return ""


def _has_broken(*values: TensorValue | None) -> bool:
    return any(value is not None and value.nonfinite for value in values)


def _at(node: TensorNode) -> str:
    if node.source is None:
        return ""
    return f", {visible(node.name)} at {visible(ProgramLine(node.source).place)}"


def title_of(graph: TensorGraphEvent) -> str:
    """Return the heading of a graph: the call that began it, and how often."""
    if graph.began == "forward":
        return "Operations, before any backward pass"
    title = "backward()" if graph.began == "backward" else "torch.autograd.grad()"
    if graph.source is not None:
        title = graph.source.text or title
    return visible(title)


def told_graph(graph: TensorGraphEvent, values: str = "values of the first → the last") -> str:
    """Return where a graph's passes began, how many there were, and of which the values are."""
    parts = []
    if graph.source is not None:
        parts.append(visible(ProgramLine(graph.source).place))
    if graph.began != "forward":
        last = graph.first + graph.passes - 1
        if graph.passes > 1:
            parts.append(f"{graph.passes:,} passes alike: {values}")
        elif last:
            parts.append(f"pass {graph.first}")
    if graph.failed:
        parts.append(f"{counted(graph.failed, 'pass')} ended with an error")
    if graph.left_out:
        parts.append(f"{counted(graph.left_out, 'operation')} left out")
    return " · ".join(parts)


def name_of(node: TensorNode, place: int) -> str:
    """Return what a tensor is called: the variable that holds it, else its operation and number."""
    if node.variable:
        return visible(node.variable)
    return f"{visible(node.name)} #{place}"


def shown(value: TensorValue | None) -> str:
    """Return a value: its numbers, or if they were not read its shape."""
    if value is None:
        return ""
    if value.text:
        return value.text
    return shape_of(value)


def shape_of(value: TensorValue | None) -> str:
    """Return the type and shape of a value: ``float32[2, 3]``."""
    if value is None:
        return ""
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"


def course(first: TensorValue | None, last: TensorValue | None) -> str:
    """Return a value that changed from pass to pass: ``0.5 → 0.1``."""
    if last is None or last == first:
        return shown(first)
    return f"{shown(first)} → {shown(last)}"


def newest(first: TensorValue | None, last: TensorValue | None) -> str:
    """Return a value as it was in the last pass, without the mean of many numbers."""
    text, _, _ = shown(last or first).partition(", mean ")
    return text


def kept(node: TensorNode) -> str:
    """Return ``.grad`` if it is another than the gradient of the last pass, as where passes add up."""
    newest = node.last_gradient or node.gradient
    if node.kept is None or node.kept == newest:
        return ""
    return shown(node.kept)


def is_broken(node: TensorNode) -> bool:
    """Whether a value or gradient is not finite."""
    return _has_broken(node.value, node.last, node.gradient, node.last_gradient, node.kept)


def told_saved(node: TensorNode) -> str:
    """Return what an operation keeps for backward: ``self [2] 8 B, packed``."""
    parts = []
    for saved in node.saved:
        shape = "packed" if saved.shape is None else str(list(saved.shape))
        size = f" {sized(saved.bytes)}" if saved.bytes else ""
        parts.append(f"{saved.name or 'ctx'} {shape}{size}")
    return ", ".join(parts)


def told_firing(firing: HookFiring) -> str:
    """Return one call of a hook: ``[2, 2] → returned [1, 1]``."""
    given = shown(firing.given) or "none"
    if firing.did == "nothing":
        return f"{given}, returned nothing"
    if firing.did == "raised":
        return f"{given}, raised an error"
    verb = "returned" if firing.did == "returned" else "changed it in place to"
    return f"{given} → {verb} {shown(firing.result) or 'None'}"


def told_hook(hook: TensorHook) -> str:
    """Return a hook and its owner: ``clip (train.py:8)``."""
    return f"{visible(hook.name)} ({visible(hook.owner)})"


def told_times(hook: TensorHook) -> str:
    """Return how often a hook was called: ``3 times``."""
    if hook.kind == "retain-grad":
        return "keeps the gradient in .grad"
    if not hook.times:
        return "removed before it was called" if hook.removed else "never called"
    told = "once" if hook.times == 1 else f"{hook.times:,} times"
    if hook.removed:
        told += ", then removed"
    return told


def in_order(hooks: Sequence[TensorHook]) -> list[TensorHook]:
    """Return hooks in the order of their first calls, those never called last."""

    def place(hook: TensorHook) -> tuple[bool, int, int]:
        if not hook.firings:
            return True, 0, 0
        first = hook.firings[0]
        return False, first.at, first.order

    return sorted(hooks, key=place)


def findable_leaves(graph: TensorGraphEvent) -> Iterator[tuple[int, TensorNode]]:
    """Yield the leaves of a graph with their places."""
    for place, node in enumerate(graph.nodes):
        if node.kind == "leaf":
            yield place, node
