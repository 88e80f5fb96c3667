"""The tensors held at a moment, as a tree of modules, operations and tensors, and as text."""

from __future__ import annotations

from kedge.report.held import LEAST, folded_paths, held_tree, icicle, icicle_text
from kedge.store.held_tensors import HeldSpan, HeldTensors, TensorKind

PARTS = {"norm": 100, "attn.q": 300, "mlp": 500}


def tower(blocks: int, odd: int = -1) -> HeldTensors:
    """Return the tensors of alike blocks, one of them with more in it; each holds from its own moment on."""
    kinds, spans = [], []
    for number in range(blocks):
        for part, size in PARTS.items():
            spans.append(
                HeldSpan(len(kinds), 1, size * (2 if number == odd else 1), number, blocks)
            )
            kinds.append(
                TensorKind(f"net.h.{number}.{part}", "ExpBackward0", "result", (size,), "float32")
            )
    return HeldTensors(tuple(kinds), tuple(spans))


def labels(held: HeldTensors, moment: int) -> dict[str, int]:
    """Return the labels of the modules in a tree, with their bytes."""
    return {
        node.label: node.bytes for node, depth, _ in held_tree(held, moment).walk() if depth <= 2
    }


def test_few_modules_stand_by_themselves() -> None:
    """A tree has a box for each module, operation and tensor; modules that hold only one other are joined with it."""
    assert labels(tower(2), 1) == {"": 1800, "net.h": 1800, "0": 900, "1": 900}
    tree = held_tree(tower(2), 0)
    walked = [
        (node.label, node.level, depth, before)
        for node, depth, before in tree.walk()
        if node.bytes == 500
    ]
    assert walked == [
        ("mlp", "module", 2, 400),
        ("ExpBackward0", "operation", 3, 400),
        ("result float32 500", "tensor", 4, 400),
    ]


def test_alike_blocks_of_a_large_model_fold() -> None:
    """As long as only some of them hold something, their fold has the bytes of those; a block that differs stands alone."""
    assert labels(tower(48), 47) == {
        "": 43200,
        "net.h.0-47": 43200,
        "norm": 4800,
        "attn.q": 14400,
        "mlp": 24000,
    }
    assert labels(tower(48), 5)["net.h.0-47"] == 5400
    assert labels(tower(48, odd=3), 47) == {"": 44100, "net.h": 44100, "0-2,4-47": 42300, "3": 1800}
    assert folded_paths(tower(48, odd=3))["net.h.7.attn.q"] == ("net", "h", "0-2,4-47", "attn", "q")


def test_blocks_in_blocks_fold() -> None:
    """Numbers in several places of a name stand as ranges."""
    kinds = tuple(
        TensorKind(f"l.{i}.experts.{j}", "Exp", "result", (2,)) for i in range(8) for j in range(8)
    )
    held = HeldTensors(kinds, tuple(HeldSpan(number, 1, 8, 0, 1) for number in range(64)))

    assert set(folded_paths(held).values()) == {("l", "0-7", "experts", "0-7")}


def test_names_that_are_prefixes_of_others_and_the_outside_of_modules() -> None:
    """The model itself, a module that holds something beside its children, and tensors outside of all."""
    kinds = (TensorKind(""), TensorKind("a"), TensorKind("a.b"), TensorKind(None))
    held = HeldTensors(kinds, tuple(HeldSpan(number, 1, 10, 0, 1) for number in range(4)), (7,))
    tree = held_tree(held, 0)

    assert [(node.label, node.bytes) for node in tree.inside.values()] == [
        ("(unknown)", 10),
        ("a", 20),
        ("(outside of modules)", 10),
        ("(smaller tensors)", 7),
    ]


def test_the_text_has_a_bar_where_each_box_lies() -> None:
    """A bar begins below that of the box around it; boxes of a small share have no line."""
    lines = list(icicle(held_tree(tower(48), 47), width=90))

    assert [line.name.strip() for line in lines][:2] == ["net.h.0-47", "norm"]
    assert [line.bar for line in lines if line.name.strip() == "mlp"] == [" " * 40 + "█" * 50]
    assert lines[0].share == "100.0 %"
    assert [line.name for line in icicle(held_tree(tower(12), 11))] == [
        "net.h",
        *(f"  {n}" for n in range(12)),
    ]
    kinds = TensorKind("large", "Exp"), TensorKind("small", "Exp")
    shown = icicle_text(
        held_tree(HeldTensors(kinds, (HeldSpan(0, 1, 1000, 0, 1), HeldSpan(1, 1, 10, 0, 1))), 0)
    )
    assert LEAST > 10 / 1010
    assert "large" in shown
    assert "small" not in shown
