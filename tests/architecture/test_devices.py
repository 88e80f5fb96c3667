"""Devices are PyTorch's accelerator, whichever that is: one file names them, and one more names what only CUDA has."""

from __future__ import annotations

import ast

ACCELERATORS, CUDA = "torch_internals/accelerators.py", "torch_internals/cuda.py"
ONE_KIND = (
    "torch.cuda",
    "torch.xpu",
    "torch.mps",
    "torch.mtia",
    "torch.hpu",
    "torch.npu",
    "torch.backends.mps",
)
SCRIPT = "repro/script.py"  # runs without Kedge


def _named(source):
    """Yield every name that a file reaches through ``torch``, or imports from it."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Call):
            yield node, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)


def _at(sources, names, *, but):
    return [
        f"{source.at(node)} {name}"
        for source in sources
        if source.name not in but
        for node, name in _named(source)
        if any(name == each or name.startswith(f"{each}.") for each in names)
    ]


def test_one_file_names_cuda(sources):
    """Code for one kind of device alone is in one place, with what other devices have instead."""
    assert _at(sources, ONE_KIND, but={CUDA}) == []
    assert [source.name for source in sources if source.name == CUDA]


def test_streams_events_and_generators_come_from_one_file(sources):
    """No other file makes an event, asks for a stream or reads a generator by itself."""
    names = (
        "torch.get_device_module",
        "torch.random.fork_rng",
        "torch.get_rng_state",
        "torch.set_rng_state",
    )
    made = [
        f"{source.at(node)} {ast.unparse(node.func)}"
        for source in sources
        if source.name != ACCELERATORS
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"torch.Event", "torch.accelerator.current_stream"}
    ]
    assert _at(sources, names, but={ACCELERATORS, SCRIPT}) + made == []


def test_no_line_tells_devices_from_cuda(sources):
    """A device is not compared with the name of one kind: what it has is asked for."""
    compared = [
        f"{source.at(node)} {ast.unparse(node)}"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Compare) and ast.unparse(node).endswith(("!= 'cuda'", "== 'cuda'"))
    ]
    assert compared + _at(sources, ("is_cuda",), but=()) == []
