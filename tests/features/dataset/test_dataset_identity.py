"""What counts as the same run: functions by what they do, samples by what they are called."""

from __future__ import annotations

import cmath
import functools
import math as roots
import operator
import os
import subprocess
import sys
import threading
from argparse import Namespace
from collections import OrderedDict
from os import environ
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from kedge.errors import ExtractionFailed, OtherRun
from kedge.features.dataset import Options, extract_dataset, open_features
from kedge.features.dataset.folder.fingerprint import alike, identity
from kedge.features.extract import extract
from tests.features.dataset.imagesets import (
    Images,
    batches_of,
    change_manifest,
    features,
    in_memory,
    net,
)

NAMES = [f"image {i}" for i in range(50)]


def extracted(folder, taken=None, **options):
    """Take the features of fifty images into a folder."""
    return extract_dataset(taken or features(), batches_of(Images()), folder, Options(**options))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, {"keys": NAMES}, "there the keys are the samples' places, here 50 given, "),
        ({"keys": NAMES}, {}, ", here the samples' places; "),
        ({"keys": NAMES}, {"keys": NAMES[::-1]}, "there the keys are 50 given, "),
        ({"keys": lambda b: b[0][:, 0, 0, 1]}, {"keys": lambda b: b[0][:, 0, 0, 2]}, "the keys are <lambda> code "),
        ({}, {"batch": lambda b: b[0] * 100}, "there batch= is none, here <lambda> code "),
        ({"batch": lambda b: b[0] * 100}, {"batch": lambda b: b[0] * 10}, "there batch= is <lambda> code "),
    ],
)  # fmt: skip
def test_other_keys_or_another_batch_are_another_run(tmp_path, first, second, message):
    """What samples are called and what the model is given are part of what run it is; the same ones go on."""
    found = extracted(tmp_path / "out", **first)
    with pytest.raises(OtherRun, match="holds the features of another run") as raised:
        extracted(tmp_path / "out", **second)

    assert message in str(raised.value)
    assert extracted(tmp_path / "out", **first).samples == found.samples


def scaled(by):
    """Make a transform."""
    return lambda values: values * by


def test_another_function_of_the_same_name_is_another_run(tmp_path):
    """Two lambdas, or one with another value from outside, are told apart, and one that is made anew is the same."""
    extracted(tmp_path / "out", extract(net(), {"4": scaled(2)}))
    extracted(tmp_path / "out", extract(net(), {"4": scaled(2)}))

    for other in (scaled(3), lambda values: values + 2):
        with pytest.raises(OtherRun, match=r"there the functions are 4 <lambda> code .*, here 4 <"):
            extracted(tmp_path / "out", extract(net(), {"4": other}))
    first, second = net(), net()
    extract_dataset(lambda x: {"out": first(x)}, batches_of(Images()), tmp_path / "plain")
    extract_dataset(lambda x: {"out": second(x)}, batches_of(Images()), tmp_path / "plain")
    with torch.no_grad():
        second[0].bias.add_(1)
    with pytest.raises(OtherRun, match="the functions are features <lambda> code"):
        extract_dataset(lambda x: {"out": second(x)}, batches_of(Images()), tmp_path / "plain")


def test_a_folder_of_an_earlier_kedge_goes_on(tmp_path):
    """A folder that says nothing of functions and keys is compared in what it says."""
    taken = extract(net(), {"4": scaled(2)})
    wanted = extracted(tmp_path / "out", taken).manifest
    told = {
        name: value for name, value in wanted.items() if name not in ("functions", "keys", "batch")
    }
    (tmp_path / "out" / "features.json").write_text("{}")
    change_manifest(tmp_path / "out", **told)
    max((tmp_path / "out").glob("shard-*")).unlink()

    assert len(extracted(tmp_path / "out", taken).samples) == 50
    assert "keys" not in open_features(tmp_path / "out").manifest


PROGRAM = """
import enum, functools, sys
import numpy as np
import torch
from kedge.features.dataset.folder.fingerprint import identity

MEAN, ODD, SCALE = [0.4, 0.5], {"a", "b", "c", "d"}, {SCALE}
TABLE, ROWS = torch.arange(5.0), np.arange(6)

def helper(values):
    return values - SCALE

def whole(values, by=2.0, *, plus=(1, 2)):
    "{DOC}"
    kept = [one for one in plus if one in {"x", "y", "z", 3, None}]
    def inner(value):
        return helper(value) * TABLE[0] + ROWS[0] + len(ODD) + MEAN[0]
    return inner(values) * by + len(kept)

def again(n):
    return again(n - 1) if n else 0

class Scaled:
    def __init__(self, by):
        self.by, self.seen = by, []
    def __call__(self, values):
        return values * self.by
    def half(self, values):
        return values / 2

class Kind(enum.Enum):
    ONE = object()
    def __call__(self, values):
        return values

class Beside(Scaled):
    def __call__(self, values):
        def inner(value):
            "{DOC}"
            return value
        return inner(values) * len(self.by) + self.half(self.seen)

made = [whole, again, Scaled(3), Scaled(3).half, functools.partial(whole, by=3), functools.lru_cache(again), torch.abs]
made += [Kind.ONE, torch.compile(torch.nn.ReLU()), Beside({"x", "y"})]
print("\\n".join(map(identity, made)))
"""


def source(scale="7.5", doc="What it does."):
    """The program, which prints the identities of its functions."""
    return PROGRAM.replace("{SCALE}", scale).replace("{DOC}", doc)


def told(seed, *sources):
    """Run programs in a process with a seed of its own for the order of sets; give what each has said, line by line."""
    runs = "import sys\nfor source in sys.argv[1:]: exec(source, {'__name__': '__main__'})"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", runs, *sources]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    each = len(lines) // len(sources)
    return [lines[number * each : (number + 1) * each] for number in range(len(sources))]


def test_a_function_is_the_same_in_every_process():
    """Neither memory, nor the order of sets, nor lines and docstrings count; a value that it refers to does."""
    ((first,), (moved, other)) = (
        told("1", source()),
        told("2", "\n\n# moved down\n" + source(doc="Another text."), source(scale="8.5")),
    )
    assert moved == first

    assert [
        place for place, (mine, its) in enumerate(zip(first, other, strict=True)) if mine != its
    ] == [0, 4]
    named = [
        "whole",
        "again",
        "Scaled",
        "half",
        "partial",
        "again",
        "abs",
        "Kind",
        "OptimizedModule",
        "Beside",
    ]
    assert [line.split()[0] for line in first] == named
    assert first[6] == "abs"
    assert len(set(first)) == len(first)


class Named:
    """An object that can be called."""

    def __init__(self, by):
        self.by = by

    def __call__(self, values):
        return self.scaled(values)

    def scaled(self, values):
        """Another method, in which the attribute is used."""
        return values * self.by


class Slotted:
    """An object without a dict."""

    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by

    def __call__(self, values):
        return values * self.by


class Most(nn.Module):
    """A module without parameters."""

    def forward(self, values):
        return values.amax(1)


class Least(nn.Module):
    """The same with other code."""

    def forward(self, values):
        return values.amin(1)


Least.__qualname__ = Least.__name__ = "Most"


def module(by):
    """A module of the user's own, with a function and a number."""
    made = ModuleType("mine")
    made.__file__ = "own.py"
    exec(f"by = {by}\ndef scaled(values): return values * by", made.__dict__)
    return made


def through(held):
    """Use what something has under two names."""
    return lambda values: held.scaled(values) if values is None else held.by


def statistics(moved):
    """Normalise as in evaluation, in a wrapper that was never told so."""
    norm = nn.BatchNorm1d(2).eval()
    norm.running_mean += moved
    outer = nn.Sequential(norm)
    outer.training = True
    return outer


FIRST, SECOND = torch.zeros(2), torch.ones(2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Named(1), Named(2)),
        (functools.partial(torch.mul, other=1), functools.partial(torch.mul, other=2)),
        (scaled(torch.zeros(3)), scaled(torch.ones(3))),
        (scaled(np.zeros(3)), scaled(np.ones(3))),
        (scaled([1, 2]), scaled([1, 3])),
        (scaled({"a": 1}), scaled({"a": 2})),
        (nn.Linear(2, 2), nn.Linear(2, 2)),
        (nn.AvgPool2d(2), nn.AvgPool2d(3)),
        (torch.abs, np.abs),
        (torch.no_grad()(scaled(1)), torch.no_grad()(scaled(2))),
        (scaled(scaled(1)), scaled(scaled(2))),
        (scaled({"b", "a"}), scaled({"b", "c"})),
        (scaled([FIRST, SECOND, FIRST]), scaled([FIRST, SECOND, SECOND])),
        (Named(torch.zeros(2)), Named(torch.ones(2))),
        (Named([0.5]), Named([0.4])),
        (Named(1).scaled, Named(2).scaled),
        (Slotted(1), Slotted(2)),
        (Most(), Least()),
        (through(module(1)), through(module(2))),
        (through(SimpleNamespace(by=1)), through(SimpleNamespace(by=2))),
        (scaled(OrderedDict(a=1)), scaled(OrderedDict(a=2))),
        (operator.itemgetter("image"), operator.itemgetter("mask")),
        (torch.zeros(2).mul, torch.ones(2).mul),
        (np.vectorize(scaled(1)), np.vectorize(scaled(2))),
        (statistics(0), statistics(1)),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.GELU())),
        (nn.Conv2d(1, 1, 1, stride=1), nn.Conv2d(1, 1, 1, stride=2)),
    ],
)
def test_what_can_be_told_apart_is(one, other):
    """Objects by their attributes, partial functions by arguments, functions by the values they are made with."""
    assert identity(one) == identity(one)
    assert identity(one) != identity(other)


def test_what_cannot_be_taken_apart_counts_by_its_kind():
    """Locks, generators and what is installed go by their class or name."""
    assert identity(scaled(object())) == identity(scaled(object()))
    assert identity(scaled(threading.Lock())) == identity(scaled(threading.Lock()))
    assert identity(scaled(open)) != identity(scaled(print))
    assert identity(scaled(i for i in "a")) == identity(scaled(i for i in "b"))
    assert identity(extract) == "extract"
    assert identity(nn.functional.relu) == "relu"
    assert identity(None) == "none"


class Busy:
    """Counts, keeps and remembers what it was given."""

    def __init__(self):
        self.count, self.seen, self.known = 0, [], {}

    def __call__(self, values):
        self.count += 1
        self.seen.append(values)
        self.known[len(values), 1] = values
        return values * 2


SEEN, KNOWN, MADE = [], {}, None


def busy(values):
    """Do the same with what is outside of it."""
    global MADE  # noqa: PLW0603 - it is what this is about
    MADE = MADE or Busy()
    SEEN.append(values)
    KNOWN[len(values), 1] = values
    return values * 2


@pytest.mark.parametrize("made", [Busy(), busy, Busy().__call__])
def test_a_function_that_changes_what_it_refers_to_needs_a_version(tmp_path, made):
    """What a function holds is part of it: the message names the ways to continue, and `version=` does."""
    found = extracted(tmp_path / "out", extract(net(), {"4": made}))
    with pytest.raises(
        OtherRun, match=r"run a new process to continue this folder, .*with version='...'"
    ):
        extracted(tmp_path / "out", extract(net(), {"4": made}))

    for _ in range(2):
        said = extracted(tmp_path / "said", extract(net(), {"4": made}), version="doubled")
    assert torch.equal(said["4"].tensor(), found["4"].tensor())


def test_what_the_user_says_counts_in_place_of_digests(tmp_path):
    """With `version=` functions go by their names, and another version, or none, is another run."""
    options = {"batch": lambda b: b[0] * 100, "keys": lambda b: b[0][:, 0, 0, 1], "version": "1"}
    other = {"batch": lambda b: b[0] * 10, "keys": lambda b: b[0][:, 0, 0, 2], "version": "1"}
    found = extracted(tmp_path / "out", extract(net(), {"4": scaled(2)}), **options)
    again = extracted(tmp_path / "out", extract(net(), {"4": scaled(3)}), **other)

    assert again.samples == found.samples
    for version, said in (("2", "'2'"), (None, "none")):
        with pytest.raises(OtherRun, match=f"there version= is '1', here {said}"):
            extracted(
                tmp_path / "out", extract(net(), {"4": scaled(2)}), **options | {"version": version}
            )
    with pytest.raises(
        OtherRun, match="there batch= is <lambda>, here halved; name another folder$"
    ):
        extracted(tmp_path / "out", extract(net(), {"4": scaled(2)}), **options | {"batch": halved})


def halved(batch):
    """Make the arguments of a batch."""
    return batch[0] / 2


def test_equal_constants_need_not_be_one_object():
    """Whether Python keeps an equal text or tuple once or twice is no part of a function; of other objects it is."""
    text, pair = "a b", ("a", "b")
    other = " ".join(pair)
    assert other is not text
    assert identity(scaled([text, text])) == identity(scaled([text, other]))
    assert identity(scaled([pair, pair])) == identity(scaled([pair, tuple(other.split())]))
    assert identity(scaled([other, {text: [pair]}])) == identity(scaled([text, {other: [pair]}]))


def test_weights_in_any_memory_have_a_digest():
    """Conjugated, negated, strided and single numbers too, and each rank's own device is the same one."""
    odd = [
        torch.tensor([1j]).conj().imag,
        torch.tensor([1 + 2j, 1j]).conj(),
        torch.arange(4.0)[::2][:1],
    ]
    assert len({identity(scaled(one)) for one in odd}) == len(odd)
    assert identity(scaled(torch.device("cuda:0"))) == identity(scaled(torch.device("cuda", 1)))
    assert identity(scaled("cuda:0")) == identity(scaled("cuda:1")) != identity(scaled("cpu"))
    assert identity(scaled("mtia:0")) == identity(scaled("mtia:1"))  # any kind that PyTorch knows
    assert identity(scaled("layer:0")) != identity(scaled("layer:1"))


def around(inner):
    """Make a function around another one."""
    return lambda values: inner(values)


def test_functions_around_functions_have_an_end(tmp_path):
    """Functions that are around each other are gone into, those that refer to themselves once; too many are an error."""
    first, second = scaled(1), scaled(2)
    for _ in range(50):
        first, second = around(first), around(second)
    assert identity(first) != identity(second)
    kept = []
    kept.append(scaled(kept))
    assert identity(kept[0]).startswith("<lambda> code ")
    for _ in range(sys.getrecursionlimit() // 2):
        first = around(first)
    with pytest.raises(
        ExtractionFailed, match=r"no digest of it can be made: .* recursion .*, with version='...'"
    ):
        extracted(tmp_path / "out", extract(net(), {"4": first}))
    assert len(extracted(tmp_path / "out", extract(net(), {"4": first}), version="1").samples) == 50


OWN = """
import enum, torch
from dataclasses import dataclass

WORDS = ("to be", "or not to be", "that is the question", 1 + 2j)
KINDS = frozenset({"one", "two", "three", "to be", ("or not to be", 3)})

class Color(enum.Enum):
    RED, GREEN = "to be", ("or not to be", 7)

@dataclass(frozen=True)
class Setting:
    name: str = "to be"
    by: float = 0.5

def scaled(values, setting=Setting(), words=("to be", "or not to be")):
    return values * setting.by if setting.name in KINDS and words[0] in WORDS else Color.RED
"""

TELLING = """
import multiprocessing, sys
from own import Color, Setting, scaled
from kedge.features.dataset.folder.fingerprint import identity

def told(sent=None):
    joined = " ".join(["to", "be"])  # equal to a constant, and another object
    made = [scaled, Setting("or not " + joined), lambda v: scaled(v, words=(joined, Color.GREEN)), lambda v: own.scaled(v)]
    return " ".join(map(identity, made))

import own
if __name__ == "__main__":
    print(told())
    for way in sys.argv[1:]:
        with multiprocessing.get_context(way).Pool(1) as pool:
            print(pool.apply(told))
"""


def test_functions_of_a_module_are_the_same_however_it_was_loaded(tmp_path):
    """From source or compiled before, in a process that was forked or spawned, with any order of sets."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "telling.py").write_text(TELLING)
    lines = []
    for seed, way in (("3", "fork"), ("4", "spawn")):  # the first one compiles own.py
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONDONTWRITEBYTECODE": "",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-W", "ignore", "telling.py"]
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        lines += subprocess.run([*command, way], check=True, **options).stdout.splitlines()
    changed = OWN.replace("values * setting.by", "values / setting.by")
    (tmp_path / "own.py").write_text(changed + "# so that it has another size")
    done = subprocess.run(command, check=True, **options)

    assert len(lines) == 4
    assert len(set(lines)) == 1
    same = [
        mine == its
        for mine, its in zip(
            lines[0].split(" "), done.stdout.split("\n")[0].split(" "), strict=True
        )
    ]
    assert [ours for text, ours in zip(lines[0].split(" "), same, strict=True) if "/" in text] == [
        False,
        True,
        False,
        False,
    ]


def test_digests_of_two_versions_of_python_are_not_compared():
    """Another Python has other bytecode, and an earlier Kedge made digests in another way, so there names alone count."""
    assert alike({"4": "f code 3.11:ab"}, {"4": "f code 3.12:cd"})
    assert alike({"4": "f code 3.11:ab"}, {"4": "f code 2/3.11:cd"})
    assert not alike({"4": "f code 3.11:ab"}, {"4": "g code 3.12:cd"})
    assert not alike({"4": "f code 3.11:ab"}, {"4": "f code 3.11:cd"})
    assert not alike({"4": "f"}, {"5": "f"})


def test_values_are_those_of_the_run_that_is_asked_for(tmp_path):
    """In a folder of its own, another batch= has its own values under its own keys."""
    extracted(tmp_path / "one")
    found = extracted(tmp_path / "two", batch=lambda b: b[0] * 100, keys=NAMES)

    wanted = in_memory((x * 100,) for x, _ in batches_of(Images()))
    assert found.samples == tuple(NAMES)
    assert torch.equal(found["4"].tensor(), wanted["4"])


ARGS = Namespace(scale=2.0, size=3, stop=8)


def _scaled(batch):
    return batch * ARGS.scale


def _sized(args, batch):
    return batch[: args.size]


def _scaled_and_sized(batch):
    return _sized(ARGS, batch * ARGS.scale)


def _with_all_options(batch):
    return batch, vars(ARGS)


@pytest.mark.parametrize(
    ("function", "counting"),
    [
        (_scaled, {"scale"}),
        (_scaled_and_sized, {"scale", "size"}),
        (_with_all_options, {"scale", "size", "stop"}),
    ],
)
def test_of_the_options_of_a_command_line_those_count_that_the_code_names(
    function, counting, monkeypatch
):
    """Another number of samples in the options is no other function; another scale, in a function that is called, is."""
    before = identity(function)
    changed = set()
    for name, value in vars(ARGS).items():
        monkeypatch.setattr(ARGS, name, value + 1)
        if identity(function) != before:
            changed.add(name)
        monkeypatch.setattr(ARGS, name, value)

    assert changed == counting


def test_modules_of_installed_packages_are_told_apart(monkeypatch):
    """A function that takes another library under the same name is another function."""
    before = identity(_rooted)
    monkeypatch.setitem(globals(), "roots", cmath)

    assert identity(_rooted) != before


def _rooted(x):
    return roots.sqrt(x)


def test_the_environment_does_not_count(monkeypatch):
    """Ranks read their number from it, and compute the same features."""
    before = identity(_ranked)
    monkeypatch.setenv("RANK", "7")

    assert identity(_ranked) == before


def _ranked(batch):
    return batch, environ["RANK"]
