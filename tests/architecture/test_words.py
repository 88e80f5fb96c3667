"""One word for one thing, in the names that Kedge makes."""

from __future__ import annotations

import ast
import collections
import re

# Each already means something else to those who use PyTorch.
TAKEN = {
    "probe": "a trained classifier",
    "guard": "Dynamo's condition for compiling again",
    "view": "a tensor that shares memory with another",
    "trace": "what jit, fx and the profiler make",
    "cache": "what is kept to save work",
}
FORMS = {
    form: word
    for word in TAKEN
    for form in (word, word + "s", word + "d", word + "r", word + "ed", word.rstrip("e") + "ing")
}
FACELESS = {"utils", "util", "helpers", "helper", "common", "base", "misc"}


def _words(name):
    """Split a name at underscores and capitals: ``HookCache`` and ``hook_cache`` are both hook, cache."""
    return re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())


def _is_own(value):
    """Whether an attribute is set on the object itself, and not on torch's configuration."""
    return isinstance(value, ast.Name) and value.id in {"self", "cls"}


def _made(tree):
    """Yield the names that a file makes; those that it only uses may be other people's."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node, node.name
        elif isinstance(node, ast.arg):
            yield node, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node, node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and _is_own(node.value)
        ):
            yield node, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node, node.asname


def test_no_name_uses_a_word_that_is_taken(sources):
    """A name says what a thing is in the project's own words."""
    taken = {
        f"{source.at(node)} {name}: {TAKEN[FORMS[word]]}"
        for source in sources
        for node, name in _made(source.tree)
        for word in _words(name)
        if word in FORMS
    }

    assert taken == set()


def test_no_file_has_a_name_that_takes_anything(sources):
    """A file's name says what does not belong into it."""
    parts = {source.name: set(re.split(r"[/._]", source.name)) for source in sources}
    faceless = {name for name, words in parts.items() if words & (FACELESS | set(FORMS))}

    assert faceless == set()


def test_a_public_class_name_occurs_once(sources):
    """A class can be named without its module: a search for the name finds one class."""
    found = collections.defaultdict(list)
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(source.at(node))

    assert {name: places for name, places in found.items() if len(places) > 1} == {}
