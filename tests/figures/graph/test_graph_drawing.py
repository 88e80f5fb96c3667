"""The graph that autograd has made, drawn: what is folded, what is written, and that graphviz reads it."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import kedge
from kedge.errors import CannotDraw
from kedge.figures.graph import graph

needs_dot = pytest.mark.skipif(
    shutil.which("dot") is None, reason="graphviz's program dot is not installed"
)
WILD = 'a"b\\n<c>&{|}'


def boxes(text):
    """Return the labels of the boxes of a drawing."""
    return [
        found.replace("\\n", "\n")
        for found in re.findall(r'n\d+ \[label="((?:[^"\\]|\\.)*)"', text)
    ]


@pytest.fixture(scope="module")
def resnet():
    """A ResNet-50 and the graph of its loss, with one hook."""
    torch.manual_seed(0)
    model, images = ResNetForImageClassification(ResNetConfig()).eval(), torch.randn(1, 3, 32, 32)
    losses = []

    def run():
        losses.append(model(images, labels=torch.tensor([1])).loss)
        return losses[0]

    with kedge.hook(model, "resnet.encoder.stages.3:out.grad", kedge.record()):
        drawn = graph(run, model)
        losses[0].backward()
    return drawn


def test_a_resnet_50_is_folded_until_it_can_be_read(resnet):
    """Of 179 operations a drawing has fewer than 60 boxes, and what is folded away is counted in them."""
    found = boxes(resnet.dot())
    operations = sum(node.kind == "operation" for node in resnet.nodes)
    folded = sum(int(n) for box in found for n in re.findall(r"(\d+) operations", box))

    assert operations == 179
    assert 20 < len(found) <= 60
    assert folded > 150
    assert sum("ResNetBottleNeckLayer" in box for box in found) == 16


def test_a_selector_opens_what_it_stands_for(resnet):
    """What a selector stands for is opened, and nothing else."""
    closed, opened = (
        boxes(resnet.dot(depth=1)),
        boxes(resnet.dot(depth=1, expand="resnet.encoder.stages.0.layers.0")),
    )

    assert sum("ResNetModel" in box for box in closed) == 1
    assert sum("ResNetShortCut" in box for box in opened) == 1
    assert sum("ResNetStage" in box for box in opened) == 3


def test_each_byte_and_each_hook_is_drawn_once(resnet):
    """At every depth the boxes hold all that is saved, and the hook is on one of them."""
    for depth in range(6):
        text = resnet.dot(depth=depth)
        sizes = [
            node for box in boxes(text) for node in re.findall(r"saves ([\d.]+) (B|kB|MB)", box)
        ]
        total = sum(float(size) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit] for size, unit in sizes)

        assert total == pytest.approx(resnet.bytes, rel=0.02)
        assert sum("resnet.encoder.stages.3:out.grad record()" in box for box in boxes(text)) == 1


def test_edges_join_boxes_and_make_no_circle(resnet):
    """Data goes from box to box, never back, whatever is folded."""
    for depth in (0, 1, 3, None):
        edges = [
            tuple(map(int, pair))
            for pair in re.findall(r"n(\d+) -> n(\d+)", resnet.dot(depth=depth))
        ]
        after = {}
        for one, other in edges:
            after.setdefault(one, set()).add(other)
        done, left = set(), set(after) | {other for _, other in edges}
        while ready := {one for one in left if not after.get(one, set()) - done}:
            done |= ready
            left -= ready

        assert len(set(edges)) == len(edges)
        assert left == set()


def test_a_flat_model_is_drawn_in_no_more_boxes_than_allowed():
    """Where no module groups a thousand operations, those that follow each other are drawn as one."""
    x = torch.ones(3, requires_grad=True)

    def run():
        y = x
        for _ in range(1000):
            y = (y * 2).sin()
        return y

    drawn = graph(run)
    found = boxes(drawn.dot(most=25))

    assert len(drawn) == 2001
    assert len(found) == 25
    assert sum(int(n) for box in found for n in re.findall(r"(\d+) operations", box)) == 2000


def test_calls_of_one_module_are_told_apart():
    """A module that is called several times is drawn once a call, with the number."""
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)
    text = graph(lambda: model(torch.ones(1, 2)), model).dot()

    assert sum("1#0  ReLU" in box for box in boxes(text)) == 1
    assert sum("1#1  ReLU" in box for box in boxes(text)) == 1


def test_a_parameter_of_two_modules_is_drawn_once():
    """A weight that two modules share stands outside of both, under its full name; any other inside of its module."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
            self.other.weight = self.one.weight

        def forward(self, x):
            return self.other(self.one(x).sin())

    model = Tied()
    found = [
        box.partition("\n")[0] for box in boxes(graph(lambda: model(torch.ones(2, 3)), model).dot())
    ]

    assert sorted(name for name in found if "weight" in name or "bias" in name) == [
        "bias",
        "bias",
        "one.weight",
    ]


@pytest.fixture
def wild():
    """A graph whose module, parameter and hook have names that mean something in DOT."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module(WILD, nn.Linear(2, 2))

        def forward(self, x):
            return self.get_submodule(WILD)(x).sin().cos()

    model = Odd()
    with kedge.hook(model, ":out.grad", kedge.record()):
        return graph(lambda: model(torch.ones(1, 2)), model)


@pytest.mark.filterwarnings("ignore::kedge.errors.NeverFiredWarning")
def test_names_are_escaped(wild):
    """Whatever a module is called, it is drawn as text."""
    text = wild.dot(depth=9)

    assert 'a\\"b\\\\n<c>&{|}' in text
    assert re.sub(r'"(?:[^"\\]|\\.)*"', "", text).count('"') == 0


@needs_dot
@pytest.mark.filterwarnings("ignore::kedge.errors.NeverFiredWarning")
def test_graphviz_draws_it(wild, resnet):
    """Graphviz reads what is written, without a warning, and names come out as they are."""
    for drawn, expected in ((wild, WILD), (resnet, "ResNetForImageClassification")):
        ended = subprocess.run(
            ["dot", "-Tsvg"], input=drawn.dot(depth=9), capture_output=True, text=True, check=True
        )
        words = "".join(ET.fromstring(drawn.svg(depth=9)).itertext())

        assert ended.stderr == ""
        assert expected in words
        assert drawn._repr_svg_().startswith("<svg")


@pytest.mark.filterwarnings("ignore::kedge.errors.NeverFiredWarning")
def test_without_graphviz_kedge_draws_it(wild, resnet, monkeypatch):
    """Where dot is missing, Kedge draws the same boxes itself, and names come out as they are."""
    monkeypatch.setenv("PATH", "")

    for drawn, expected in ((wild, WILD), (resnet, "ResNetForImageClassification")):
        svg = drawn.svg(depth=9)
        words = list(ET.fromstring(svg).itertext())
        boxes = drawn.dot(depth=9).count("[label=")

        assert expected in "".join(words)
        assert svg.count('<g class="box') == boxes
        assert drawn._repr_svg_().startswith("<svg")


def test_it_prints_as_a_table(resnet):
    """Printed, a graph is a table by module whose figures add up to all."""
    lines = str(resnet).splitlines()
    operations = [int(line.split()[-4]) for line in lines[3:]]

    assert lines[0].startswith("179 operations, ")
    assert lines[3].split()[0] == "resnet"
    assert sum(operations) == 179


def test_a_drawing_of_nothing_is_refused() -> None:
    """A graph is drawn with one box at least."""
    found = graph(lambda: nn.Linear(2, 1)(torch.ones(1, 2)))
    with pytest.raises(CannotDraw, match="at least one box"):
        found.dot(most=0)
