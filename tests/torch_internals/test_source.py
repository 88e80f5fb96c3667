"""The program's own lines: who calls a module, where its forward begins, and what modules there are."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import zipfile
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kedge.frames import SourceLine
from kedge.torch_internals.source_lines import (
    calling_frame,
    forward_of,
    module_tree,
    place_of,
    source_of,
)

NET = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        def forward(self, x):
            x = self.fc(x)  # grüße
            return self.layers(
                x
            )

    def run(net):
        return net(torch.ones(1, 2))
"""


def call_site(module: nn.Module) -> SourceLine | None:
    """Return, inside a module's hook, the line of the program that calls it."""
    frame = calling_frame(module)
    return None if frame is None else source_of(frame)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, and where modules are imported from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    linecache.clearcache()
    yield tmp_path
    for name in ("net", "wrapped"):
        sys.modules.pop(name, None)


def sources(module: nn.Module, call: Any) -> dict[str, SourceLine | None]:
    """The source of every module that a call reaches, as its hooks find it."""
    found: dict[str, SourceLine | None] = {}
    handles = [
        m.register_forward_pre_hook(lambda m, args, n=n: found.setdefault(n, call_site(m)) and None)
        for n, m in module.named_modules()
    ]
    call(module)
    for handle in handles:
        handle.remove()
    return found


def test_the_line_that_calls_a_module_is_the_programs(folder):
    """File, line, function and text are those of the call; a layer of a Sequential has the call of the whole."""
    (folder / "net.py").write_text(dedent(NET), encoding="utf-8")
    import net

    found = sources(net.Net(), net.run)

    assert found[""] == SourceLine("net.py", 18, "run", "return net(torch.ones(1, 2))")
    assert found["fc"] == SourceLine("net.py", 12, "Net.forward", "x = self.fc(x)  # grüße")
    assert found["layers"] == SourceLine("net.py", 13, "Net.forward", "return self.layers(")
    assert found["layers.0"] == found["layers.1"] == found["layers"]


def test_wrappers_are_passed_over(folder):
    """Python's own library and a __call__ of the module itself, decorated or not, are not the caller."""
    source = """
        import contextlib, functools
        import torch
        from torch import nn

        def loud(call):
            @functools.wraps(call)
            def louder(self, *args):
                return call(self, *args)
            return louder

        class Layer(nn.Linear):
            @loud
            def __call__(self, *args):
                return super().__call__(*args)

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = Layer(2, 2), Layer(2, 2)

            @torch.no_grad()
            def forward(self, x):
                return functools.reduce(lambda x, layer: layer(x), [self.a, self.b], x)

        @contextlib.contextmanager
        def around(net):
            yield functools.partial(net, torch.ones(1, 2))

        def run(net):
            with around(net) as call:
                return call()
    """
    (folder / "wrapped.py").write_text(dedent(source))
    import wrapped

    found = sources(wrapped.Net(), wrapped.run)

    assert found[""] == SourceLine("wrapped.py", 32, "run", "return call()")
    line = "return functools.reduce(lambda x, layer: layer(x), [self.a, self.b], x)"
    assert (
        found["a"]
        == found["b"]
        == SourceLine("wrapped.py", 24, "Net.forward.<locals>.<lambda>", line)
    )


def test_code_without_a_file_has_no_text(folder):
    """Executed strings and deleted files give their name and line; the text is None, and never another file's."""
    (folder / "net.py").write_text(dedent(NET), encoding="utf-8")
    for file in ("<string>", "gone.py"):
        names: dict[str, Any] = {
            "__name__": __name__,
            "__loader__": __loader__,
            "__file__": __file__,
        }
        exec(compile(dedent(NET), file, "exec"), names)
        found = sources(names["Net"](), names["run"])

        assert found["fc"] == SourceLine(file, 12, "Net.forward", None)


def test_a_cell_of_a_notebook_is_known_to_linecache(folder):
    """What IPython puts into linecache is the text of a cell."""
    file = "<ipython-input-3-c0ffee>"
    names: dict[str, Any] = {}
    exec(compile(dedent(NET), file, "exec"), names)
    linecache.cache[file] = (1, None, dedent(NET).splitlines(keepends=True), file)

    assert sources(names["Net"](), names["run"])["fc"] == SourceLine(
        file, 12, "Net.forward", "x = self.fc(x)  # grüße"
    )


def test_a_file_that_is_no_utf8_and_a_zip_file_are_read(folder):
    """A declared encoding is honoured, an undeclared one gives no text, and a zip file's loader is asked."""
    (folder / "net.py").write_bytes(b"# -*- coding: latin-1 -*-" + dedent(NET).encode("latin-1"))
    import net

    assert sources(net.Net(), net.run)["fc"].text == "x = self.fc(x)  # grüße"
    broken = folder / "broken.py"
    broken.write_bytes(dedent(NET).encode("latin-1"))
    names: dict[str, Any] = {}
    exec(compile(dedent(NET), str(broken), "exec"), names)
    assert sources(names["Net"](), names["run"])["fc"] == SourceLine(
        "broken.py", 12, "Net.forward", None
    )

    del sys.modules["net"]
    (folder / "net.py").unlink()
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        archive.writestr("net.py", dedent(NET).encode())
    sys.path.insert(0, str(folder / "all.zip"))
    try:
        import net
    finally:
        sys.path.remove(str(folder / "all.zip"))
    place = f"all.zip{os.sep}net.py"
    assert sources(net.Net(), net.run)["fc"] == SourceLine(
        place, 12, "Net.forward", "x = self.fc(x)  # grüße"
    )


def test_a_file_outside_the_current_folder_has_its_whole_path(folder, monkeypatch):
    """Paths are relative only inside the current folder, and whole where that folder is gone."""
    (folder / "net.py").write_text(dedent(NET), encoding="utf-8")
    import net

    gone = folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert sources(net.Net(), net.run)["fc"].file == str(folder / "net.py")
    gone.rmdir()
    assert sources(net.Net(), net.run)["fc"].file == str(folder / "net.py")


def test_a_thread_that_runs_nothing_else_has_no_line():
    """Where no frame is the program's, there is no source."""
    found: list[SourceLine | None] = []
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(lambda module, args: found.append(call_site(module)))
    thread = threading.Thread(target=nn.Sequential(model), args=(torch.ones(1, 2),))
    thread.start()
    thread.join()

    assert found == [None]
    assert calling_frame() is None


class Inner(nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return x


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.inner = nn.ModuleDict({"a": Inner(), "again": self.first})
        self.tied = nn.Linear(3, 2, bias=False)
        self.tied.weight = self.first.weight
        self.lazy = nn.LazyLinear(4)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)


def test_the_forward_of_a_class_is_found_below_its_decorators():
    """File and line are those of the class's own forward; a class without one has none."""
    here = str(Path(__file__)).removeprefix(f"{Path.cwd()}{os.sep}")

    assert forward_of(Inner()) == (here, Inner.forward.__wrapped__.__code__.co_firstlineno)
    assert forward_of(nn.ModuleList()) is None
    assert forward_of(Tree()) is None
    assert forward_of(torch.jit.trace(nn.ReLU(), torch.ones(1))) is None
    assert forward_of(nn.Linear(1, 1))[0].endswith("linear.py")


def test_the_tree_lists_every_module_once():
    """Paths carry the label; shared modules and parameters count once, lazy ones 0, frozen ones are not trainable."""
    tree = module_tree(Tree(), lambda path: f"Tree.{path}".rstrip("."))

    assert [(e["path"], e["type"], e["parameters"], e["trainable"]) for e in tree] == [
        ("Tree", "Tree", 5, 0),
        ("Tree.first", "Linear", 8, 8),
        ("Tree.inner", "ModuleDict", 0, 0),
        ("Tree.inner.a", "Inner", 0, 0),
        ("Tree.tied", "Linear", 0, 0),
        ("Tree.lazy", "LazyLinear", 0, 0),
    ]
    assert [e["file"] is None for e in tree] == [True, False, True, False, False, False]
    assert tree[3]["line"] == forward_of(Inner())[1]


def test_a_cell_of_a_notebook_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that Jupyter names for a cell does not exist; its tracebacks say `In[4]`."""
    compiler = pytest.importorskip("IPython.core.compilerop").CachingCompiler()
    name = compiler.cache("x = 1", number=4)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(compile=compiler))

    assert place_of(name) == "In[4]"
    assert place_of("/opt/net.py") == "/opt/net.py"


def test_outside_of_notebooks_files_keep_their_names() -> None:
    """IPython may be imported without a notebook."""
    pytest.importorskip("IPython")

    assert place_of("/opt/net.py") == "/opt/net.py"
