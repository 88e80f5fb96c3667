"""What import-linter cannot see: where imports stand, circles of files, and the root that inner code must not import."""

from __future__ import annotations

import ast
import sys

FOR_A_MOMENT = "torch_internals/hook_tables.py"  # it hooks what it looks at where PyTorch names the table otherwise
LAZY = {"cli", "integrations"}
IN_TOUCH = {
    "examination",
    "hooks",
    "inspection",
    "replaying",
    "repro",
    "running",
    "verify",
    "watch",
}
MODES = {
    "TorchFunctionMode",
    "TorchDispatchMode",
    "saved_tensors_hooks",
    "save_on_cpu",
    "disable_saved_tensors_hooks",
}


def _imported(tree):
    """Yield every import with the names of what it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield node, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            yield node, [f"{node.module}.{alias.name}" for alias in node.names]


def _names(tree):
    """Yield every name and attribute that is used or imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node, node.id
        elif isinstance(node, ast.Attribute):
            yield node, node.attr
        elif isinstance(node, ast.alias):
            yield node, node.name.rpartition(".")[2]


def test_imports_in_functions_are_only_at_the_rim(sources):
    """Only commands and integrations import late; an import in a function hides a direction."""
    late = {
        source.at(node)
        for source in sources
        if source.folder not in LAZY
        for function in source.functions()
        for node, _ in _imported(function)
    }

    assert late == set()


def test_inner_code_never_imports_the_root(sources):
    """Every file imports from the module that defines a name, so that the root package only collects."""
    modules = {source.module for source in sources}
    folders = {module.rpartition(".")[0] for module in modules}
    through_root = {
        f"{source.at(node)} {name}"
        for source in sources
        for node, names in _imported(source.tree)
        for name in names
        if name == "kedge" or (name.rpartition(".")[0] == "kedge" and name not in modules | folders)
    }

    assert through_root == set()


def _graph(sources):
    """Map each module to the modules that it imports, those for type checking included."""
    modules = {source.module: source for source in sources}
    graph = {}
    for name, source in modules.items():
        wanted = [found for _, names in _imported(source.tree) for found in names]
        reached = {found if found in modules else found.rpartition(".")[0] for found in wanted}
        graph[name] = reached & set(modules) - {name}
    return graph


def _reached(graph, start):
    """Return every module that one leads to, itself only if it is in a circle."""
    found, waiting = set(), [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def _late(source):
    """Yield every call of `import_module`, with the name of the module, None if it is computed, and its source."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            (name,) = node.args
            yield node, name.value if isinstance(name, ast.Constant) else None, ast.unparse(name)


def test_an_import_by_name_is_one_that_the_contract_sees(sources):
    """A module of Kedge that is loaded late is also imported for type checking, so that no direction is hidden."""
    graph = _graph(sources)
    hidden = {
        f"{source.at(node)} {name}"
        for source in sources
        if not source.name.endswith("__init__.py")  # public names, which nobody inside imports
        for node, name, text in _late(source)
        if name in graph
        if not any(f"{each}.".startswith(f"{name}.") for each in graph[source.module])
    }
    computed = {
        source.name
        for source in sources
        for _, name, text in _late(source)
        if name is None and "kedge" in text and not source.name.endswith("__init__.py")
    }

    assert hidden == set()
    assert computed == {"calls/late_names.py", "features/dataset/folder/files.py"}


def test_no_files_import_each_other_in_a_circle(sources):
    """Each file can be read after those it imports; an import for type checking counts, and folders do not matter."""
    graph = _graph(sources)
    reached = {module: _reached(graph, module) for module in graph}

    assert sum(map(len, graph.values())) > len(graph)
    assert sorted(module for module in graph if module in reached[module]) == []


def test_no_import_is_relative_or_of_everything(sources):
    """An import names its module in full and what it takes from it."""
    vague = {
        source.at(node)
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and (node.level or node.names[0].name == "*")
    }

    assert vague == set()


def test_few_folders_touch_the_hooks_and_modes_of_torch(sources):
    """Whoever looks for what Kedge installs in PyTorch finds all of it in these folders."""
    outside = {
        f"{source.at(node)} {name}"
        for source in sources
        if source.folder not in IN_TOUCH and source.name != FOR_A_MOMENT
        for node, name in _names(source.tree)
        if name in MODES or (name.strip("_").startswith("register_") and "hook" in name)
    }

    assert outside == set()


def test_no_name_beside_the_root_hides_a_module_of_python(sources):
    """Python still starts, and finds its own modules, for somebody who works in src/kedge."""
    names = {source.module.split(".")[1] for source in sources if "." in source.module}

    assert names & sys.stdlib_module_names == set()
