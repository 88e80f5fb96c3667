"""What a rule rebuilds is, to the last bit, what autograd would have kept."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kedge.offload.rebuild import RULES, find, norms
from tests.offload.rebuild.rebuilding import Engine, same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-40, -1e-40, 3e38, -88.0, 20.0)


def leaf(shape, dtype, layout, *, special=False):
    """A leaf of random numbers, of one way to lie in memory."""
    x = torch.randn(shape) * 3
    if special:
        x.reshape(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    x = x.to(dtype)
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    if layout == "transposed":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.requires_grad_()


def weight(size, dtype):
    """A leaf of one dimension."""
    return (torch.rand(size) + 0.5).to(dtype).requires_grad_()


def saved_again(make, *, least=1, finder=find):
    """Have a product save the result and everything that led to it; compare each rebuilt tensor at once."""
    engine = Engine(least=least, check=True, finder=finder)
    with engine.in_force():
        made = make()
        held = made * torch.ones_like(made, requires_grad=True)
    return engine, made.detach(), held.grad_fn._raw_saved_self.data


def of(x):
    """The input, as something that was computed and is saved: neither a parameter nor free of a graph."""
    return F.conv2d(x, torch.eye(x.shape[1], dtype=x.dtype)[:, :, None, None].requires_grad_())


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 0.7),
    "elu, selu": F.selu,
    "celu": lambda x: F.celu(x, 1.3),
    "softplus": lambda x: F.softplus(x, 2, 5),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": lambda x: F.hardtanh(x, -2, 1),
    "hardtanh, relu6": F.relu6,
    "mish": F.mish,
    "logsigmoid": F.logsigmoid,
    "softshrink": F.softshrink,
    "glu": lambda x: F.glu(x, -1),
    "pow": lambda x: x.pow(3),
    "sin": torch.sin,
    "cos": torch.cos,
    "abs": torch.abs,
    "log": torch.log,
}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_come_from_the_input_that_is_saved(name, dtype, layout):
    """An activation's output is rebuilt from its input, with NaN, infinities, signed zeros and denormals, whatever the layout."""
    torch.manual_seed(0)
    for shape in ((2, 4, 6, 10), (3, 5, 7, 34), (1, 17, 19, 22)):
        x = leaf(shape, dtype, layout, special=True)
        engine, made, held = saved_again(lambda x=x: ACTIVATIONS[name](of(x)))

        assert engine.wrong == {}
        assert engine.rebuilt[name.split(",", maxsplit=1)[0]] == 1
        assert same_bits(held.read(), made)


def normalised(kind, x, dtype):
    """One of the normalisations."""
    w, b = weight(x.shape[1], dtype), weight(x.shape[1], dtype)
    match kind:
        case "batch_norm":
            return F.batch_norm(x, torch.zeros_like(w), torch.ones_like(w), w, b, training=True)
        case "batch_norm, plain":
            return F.batch_norm(x, None, None, None, None, training=True)
        case "batch_norm, eval":
            return F.batch_norm(x, b.detach(), w.detach(), w, b, training=False)
        case "group_norm":
            return F.group_norm(x, 2, w, b, 1e-3)
        case "layer_norm":
            return F.layer_norm(
                x, x.shape[-1:], weight(x.shape[-1], dtype), weight(x.shape[-1], dtype), 3e-5
            )
        case _:
            return F.layer_norm(x, x.shape[-2:], None, None, 1e-6)


NORMS = [
    "batch_norm",
    "batch_norm, plain",
    "batch_norm, eval",
    "group_norm",
    "layer_norm",
    "layer_norm, plain",
]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_normalised_tensors_come_from_input_and_statistics(name, dtype, layout):
    """A norm's output is rebuilt from its saved input and statistics, whatever the epsilon, size and layout."""
    torch.manual_seed(0)
    for shape in ((2, 4, 6, 10), (3, 6, 7, 33), (5, 18, 19, 8)):
        x = leaf(shape, dtype, layout)
        with torch.no_grad():
            x.mul_(torch.linspace(0.01, 30, shape[1], dtype=dtype)[:, None, None]).add_(7)
        engine, made, held = saved_again(lambda x=x: normalised(name, of(x), dtype))

        assert engine.wrong == {}
        if (
            name == "group_norm"
            and layout == "channels_last"
            and not hasattr(made.grad_fn, "_saved_eps")
        ):
            continue  # it stays; see Note [Groups without an epsilon]
        assert engine.rebuilt[name.split(",", maxsplit=1)[0]] == 1
        assert same_bits(held.read(), made)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_groups_come_from_their_statistics_where_no_epsilon_is_saved(dtype, affine, monkeypatch):
    """The node of PyTorch 2.14 keeps none; here it is hidden, whatever the version."""
    torch.manual_seed(0)
    monkeypatch.setattr(norms, "number_in", lambda node, name: None)
    for shape in ((2, 4, 6, 10), (3, 6, 7, 33)):
        x = leaf(shape, dtype, "contiguous")
        with torch.no_grad():
            x.mul_(torch.linspace(0.01, 30, shape[1], dtype=dtype)[:, None, None]).add_(7)
        w, b = (weight(shape[1], dtype) if affine else None for _ in range(2))
        engine, made, held = saved_again(lambda x=x, w=w, b=b: F.group_norm(of(x), 2, w, b, 1e-3))

        assert engine.wrong == {}
        assert engine.rebuilt["group_norm"] == 1
        assert same_bits(held.read(), made)


@pytest.mark.parametrize("name", NORMS)
def test_normalised_tensors_of_few_bits_are_exact_or_kept(name):
    """In bfloat16, weights in bfloat16 or in float32, a norm's output is rebuilt to the last bit or not at all."""
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        x = leaf((3, 6, 7, 33), torch.bfloat16, "contiguous")
        engine, made, held = saved_again(lambda x=x, dtype=dtype: normalised(name, of(x), dtype))

        assert engine.wrong == {}
        assert same_bits(held.read(), made)


def test_one_weight_with_two_epsilons():
    """A weight that normalises with another epsilon than before, or lies in the storage of all weights, misleads nobody."""
    torch.manual_seed(0)
    x = leaf((2, 4, 6, 10), torch.float32, "contiguous")
    flat = torch.rand(20)
    for w in (weight(10, torch.float32), flat[:10].requires_grad_()):
        for epsilon in (1e-5, 1e-1, 2.5e-3, 1e-12):
            with torch.no_grad():
                w.add_(1)
            engine, made, held = saved_again(
                lambda w=w, e=epsilon: F.layer_norm(of(x) * 0.01, (10,), w, w, e)
            )

            assert engine.wrong == {}
            assert engine.rebuilt["layer_norm"] == 1
            assert same_bits(held.read(), made)


def test_a_relu_behind_a_norm_comes_from_the_norms_input():
    """ReLU saves its own output only; behind a batch norm that is rebuilt from the convolution's, in place or not."""
    torch.manual_seed(0)
    x = leaf((2, 4, 6, 10), torch.float32, "contiguous")
    for relu, layout in itertools.product(
        (F.relu, F.relu_, torch.sigmoid, torch.tanh), ("contiguous", "channels_last")
    ):
        x = leaf((2, 4, 6, 10), torch.float32, layout, special=True)
        engine, made, held = saved_again(
            lambda x=x, relu=relu: relu(normalised("batch_norm", of(x), x.dtype))
        )

        assert engine.wrong == {}
        assert engine.rebuilt[getattr(relu, "__name__", "").strip("_")] == 1
        assert same_bits(held.read(), made)


def residual(x, blocks):
    """A residual stream; each block's output is saved by its ReLU."""
    x = F.relu(normalised("batch_norm", of(x), x.dtype))
    for _ in range(blocks):
        y = normalised("batch_norm", of(F.relu(normalised("batch_norm", of(x), x.dtype))), x.dtype)
        y += x
        x = F.relu_(y)
    return x


def test_a_residual_stream_is_kept_now_and_then():
    """Of a residual stream three blocks in a row are rebuilt from the one before and from what is added, then one is kept."""
    torch.manual_seed(0)
    x = leaf((2, 4, 6, 10), torch.float32, "contiguous")
    engine, made, held = saved_again(lambda: residual(x, 8))

    assert engine.wrong == {}
    assert engine.rebuilt["relu"] == 8 + 7
    assert engine.left["ReluBackward0"] == 2 * x.nbytes
    assert same_bits(held.read(), made)


def hand_written(x):
    """A gate and an RMS norm, as in Llama."""
    w, v = weight(x.shape[-1], x.dtype), weight(x.shape[-1], x.dtype)
    h = of(x)
    n = w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))
    return F.silu(n * v) * of(n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_come_from_their_factors(dtype):
    """Products are rebuilt where both factors are saved: the gates and hand-written norms of language models."""
    torch.manual_seed(0)
    x = leaf((2, 4, 6, 10), dtype, "contiguous")
    engine, made, held = saved_again(lambda: hand_written(x))

    assert engine.wrong == {}
    assert engine.rebuilt["product"] >= 3
    assert same_bits(held.read(), made)


def test_scaled_and_divided_tensors_are_rebuilt():
    """A factor may be a number, whose value the node tells; a quotient is rebuilt like a product."""
    x, w = (
        leaf((2, 4, 6, 10), torch.float32, "contiguous"),
        leaf((2, 4, 6, 10), torch.float32, "contiguous"),
    )
    for make, rule in (
        (lambda: F.softmax(of(x), -1) * 0.3, "product"),
        (lambda: 2 * torch.exp(of(x)), "product"),
        (lambda: of(x) / (of(w) + 9), "quotient"),
    ):
        engine, made, held = saved_again(make)

        assert engine.wrong == {}
        assert engine.rebuilt[rule] == 1
        assert same_bits(held.read(), made)


@pytest.mark.parametrize(
    "shapes", [((2, 4, 6, 10),) * 2, ((1, 4, 6, 10), (2, 4, 6, 10)), ((2, 4, 6, 10), (1, 4, 6, 10))]
)
def test_sums_come_from_what_was_added_also_where_one_side_is_repeated(shapes):
    """A side that was computed for the sum alone receives it in place, if it is as large as the sum."""
    torch.manual_seed(0)
    x, y = (leaf(shape, torch.float32, "contiguous") for shape in shapes)
    engine, made, held = saved_again(lambda: F.gelu(of(x)) + F.silu(of(y)))

    assert engine.wrong == {}
    assert engine.rebuilt["sum"] == 1
    assert same_bits(held.read(), made)


def test_dropout_comes_from_its_input_and_its_noise():
    """A dropout's output, saved by what follows, is rebuilt from the softmax that saved itself and from the noise's bits."""
    torch.manual_seed(0)
    x = leaf((2, 4, 64, 33), torch.float32, "contiguous")
    engine, made, held = saved_again(lambda: F.dropout(F.softmax(of(x), -1), 0.1))

    assert engine.wrong == {}
    assert engine.rebuilt["two_values"] == engine.rebuilt["product"] == 1
    assert same_bits(held.read(), made)


def test_casts_under_autocast_are_rebuilt():
    """The copies that autocast makes of weights and of normalised inputs come from the weights and from the norm's input."""
    torch.manual_seed(0)
    norm, linear = nn.LayerNorm(64), nn.Linear(64, 64)
    x = leaf((2, 4, 6, 64), torch.float32, "contiguous")
    engine = Engine(nn.ModuleList([norm, linear]), check=True, least=1)
    with engine.in_force(), torch.autocast("cpu", torch.bfloat16):
        made = linear(norm(of_last(x)))

    assert engine.wrong == {}
    assert engine.rebuilt["cast"] == 2
    made.sum().backward()


def of_last(x):
    """The input as something that was computed."""
    return x + torch.ones_like(x, requires_grad=True)


def test_a_weight_that_changed_is_refused():
    """A copy of a weight cannot be rebuilt after the weight has changed; it says so in autograd's words, and what to do."""
    w = nn.Parameter(torch.randn(8, 8))
    engine, _, held = saved_again(lambda: w.to(torch.bfloat16))
    with torch.no_grad():
        w.add_(1)

    assert engine.rebuilt["cast"] == 1
    with pytest.raises(
        RuntimeError,
        match=r"modified by an inplace operation: \[torch.FloatTensor \[8, 8\]\] is at version 1.*\(where=",
    ):
        held.read()


def test_copies_in_another_order_are_rebuilt():
    """What was transposed, permuted or reshaped and then copied is rebuilt from what saved itself."""
    torch.manual_seed(0)
    x = leaf((2, 4, 6, 10), torch.float32, "contiguous")
    for make in (
        lambda h: h.transpose(1, -1).contiguous(),
        lambda h: h.permute(-1, 2, 0, 1).reshape(20, -1),
        lambda h: h.view(8, 6, 10).transpose(-2, -1).reshape(2, -1),
        lambda h: (
            h[:, :, None].expand(2, 4, 3, 6, 10).reshape(2, 12, 6, 10)
            if h.is_leaf
            else h.transpose(0, 3).clone()
        ),
    ):
        engine, made, held = saved_again(lambda make=make: make(torch.exp(of(x))))

        assert engine.wrong == {}
        assert engine.rebuilt["copy"] == 1
        assert same_bits(held.read(), made)


def test_what_was_repeated_is_stored_once():
    """Keys that several heads share are stored once, although attention gets a copy for each head."""
    torch.manual_seed(0)
    x = leaf((2, 4, 6, 10), torch.float32, "contiguous")
    engine, made, held = saved_again(
        lambda: of(x)[:, :, None].expand(2, 4, 3, 6, 10).reshape(2, 12, 6, 10)
    )

    assert engine.rebuilt["copy"] == 1
    assert engine.by["copy"] == made.nbytes * 2 // 3
    assert same_bits(held.read(), made)


def test_what_changed_in_place_is_not_rebuilt():
    """A tensor that was changed behind autograd's back is not what its node made: it is kept."""
    x = leaf((2, 4, 6, 10), torch.float32, "contiguous")

    def changed(make):
        made = make()
        with torch.no_grad():
            made.add_(1)
        return made

    for make in (
        lambda: F.gelu(of(x)),
        lambda: F.relu(normalised("batch_norm", of(x), x.dtype)),
        lambda: of(x) * of(x),
    ):
        engine, made, held = saved_again(lambda make=make: changed(make))

        assert engine.wrong == {}
        assert held.entry.recipe is None
        assert same_bits(held.read(), made)


def test_what_an_input_became_is_not_used():
    """A rule declines when its input was changed in place after it was saved."""
    x = leaf((2, 4, 6, 10), torch.float32, "contiguous")

    def make():
        h = of(x)
        made = F.gelu(h)
        with torch.no_grad():
            h.add_(1)
        return made

    engine, _, held = saved_again(make)

    assert engine.rebuilt["gelu"] == 0
    assert held.entry.recipe is None


def test_threads_of_then():
    """What is rebuilt does not depend on how many threads there are when it is rebuilt."""
    before = torch.get_num_threads()
    x = leaf((1, 1, 333, 1001), torch.float32, "contiguous")
    try:
        for then, now in ((1, 3), (2, 1)):
            torch.set_num_threads(then)
            _, made, held = saved_again(lambda: F.mish(of(x)))
            torch.set_num_threads(now)

            assert held.entry.recipe is not None
            assert same_bits(held.read(), made)
            assert torch.get_num_threads() == now
    finally:
        torch.set_num_threads(before)


def test_autocast_at_rebuilding_changes_nothing():
    """A tensor rebuilt while autocast is on is that of the forward pass."""
    x = leaf((2, 4, 6, 10), torch.bfloat16, "contiguous")
    _, made, held = saved_again(lambda: F.softplus(of(x)))

    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(held.read(), made)


def test_recipes_keep_no_graph():
    """A graph that is never run backward goes with its last tensor, recipes and all."""
    x = leaf((2, 4, 6, 10), torch.float32, "contiguous")
    engine = Engine(least=1)
    gc.collect()
    gc.disable()
    try:
        with engine.in_force():
            made = F.gelu(residual(x, 3)) * 2
        handles = [weakref.ref(entry()) for entry in engine.entries.values()]
        assert engine.rebuilt["relu"] >= 4
        assert any(each() is not None for each in handles)
        del made
        assert all(each() is None for each in handles)
    finally:
        gc.enable()


def test_each_rule_has_its_own_node():
    """No two rules know the same node, and the account can tell rules apart by name."""
    nodes = [node for rule in RULES for node in rule.nodes]

    assert len(nodes) == len(set(nodes))
    assert all(rule.name and rule.cost in {"copy", "elementwise", "norm"} for rule in RULES)


def test_a_node_does_not_hold_its_output_while_it_saves_it():
    """A tensor that its own node saves is distinguished from a later version of it: the node's field is still empty."""
    seen = []

    def pack(value):
        if type(value.grad_fn).__name__ == "ReluBackward0":
            seen.append(value.grad_fn._raw_saved_result.data)
        return value.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held):
        made = F.relu(torch.randn(3, requires_grad=True) * 2)
        made * torch.ones(3, requires_grad=True)

    assert seen[0] is None
    assert torch.equal(seen[1], made.detach())


def test_what_is_written_down_at_a_node_stays_there():
    """A node's metadata live as long as the node, although the object that shows it to Python does not."""
    made = torch.ones(3, requires_grad=True) * 2
    made.grad_fn.metadata["depth"] = 2
    gc.collect()

    assert made.grad_fn.metadata == {"depth": 2}
