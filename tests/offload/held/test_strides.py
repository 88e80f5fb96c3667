"""Shapes, strides and bits: what is read is what was saved, and of a storage no more is taken than is worth it."""

from __future__ import annotations

import pytest
import torch

from kedge.offload.codecs import codec_of
from tests.offload.engines import Save, Shelf, engaged


def big(*shape, dtype=torch.float32):
    """Return a tensor of numbers that count up."""
    numbers = torch.arange(torch.Size(shape).numel())
    return numbers.reshape(shape).to(dtype)


SAVED = {
    "contiguous": lambda: big(4, 6),
    "transposed": lambda: big(4, 6).t(),
    "channels_last": lambda: big(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: big(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "permuted": lambda: big(2, 3, 4).permute(1, 2, 0),
    "expanded": lambda: big(4, 1).expand(4, 1000),
    "expanded within": lambda: big(2, 1, 3).expand(2, 5, 3),
    "number expanded": lambda: torch.tensor(3.0).expand(100, 100),
    "run of a large one": lambda: big(1000, 10)[17:20],
    "comb of a large one": lambda: big(1000, 10)[:, 3],
    "comb with gaps": lambda: big(100, 100)[::10, ::10],
    "third of three": lambda: big(4, 30)[:, 10:20],
    "unfolded": lambda: big(30).unfold(0, 10, 5),
    "unfolded alone": lambda: big(1000)[:30].unfold(0, 10, 5),
    "expanded alone": lambda: big(1000)[5:8, None].expand(3, 7),
    "as integers": lambda: big(4, 6).view(torch.int32),
    "as halves": lambda: big(4, 6).view(torch.float16),
    "bytes of odd number": lambda: big(7, dtype=torch.uint8)[1:],
    "complex": lambda: torch.complex(big(4, 6), big(4, 6)),
    "conjugate": lambda: torch.complex(big(4, 6), big(4, 6)).conj(),
    "negative": lambda: torch.complex(big(4, 6), big(4, 6)).conj().imag,
    "conjugate alone": lambda: torch.complex(big(400, 6), big(400, 6)).conj()[3:5],
    "real part": lambda: torch.complex(big(4, 6), big(4, 6)).real,
    "nothing": lambda: torch.empty(0, 3),
    "nothing of much": lambda: big(100)[5:5],
    "number": lambda: torch.tensor(2.5),
    "number of many": lambda: big(100)[7],
    "bool": lambda: big(4, 6) > 5,
    "bfloat16": lambda: big(5, 7, dtype=torch.bfloat16),
    "float64 column": lambda: big(9, 9, dtype=torch.float64)[:, 2:3],
}


def read_back(value):
    """Save a tensor under the hooks in force and read it."""
    y = Save.apply(torch.ones(1, requires_grad=True), value)
    return y, y.grad_fn.saved_tensors[0]


@pytest.mark.parametrize("kind", SAVED)
def test_what_is_read_is_what_was_saved(kind):
    """Values, shape, strides, dtype, and the bits that say "conjugate" and "negative" come back from a store."""
    value = SAVED[kind]()
    before = value.clone()
    shelf = Shelf()
    with engaged(shelf=shelf):
        y, saved = read_back(value)

    assert len(shelf.slots) == 1
    assert (saved.shape, saved.stride(), saved.dtype) == (value.shape, value.stride(), value.dtype)
    assert (saved.is_conj(), saved.is_neg()) == (value.is_conj(), value.is_neg())
    assert torch.equal(saved, before)
    assert y.requires_grad


@pytest.mark.parametrize(
    ("kind", "elements"),
    [
        ("transposed", 24),
        ("expanded", 4),
        ("number expanded", 1),
        ("run of a large one", 30),
        ("comb of a large one", 1000),
        ("comb with gaps", 100),
        ("third of three", 120),
        ("channels_last", 120),
    ],
)
def test_a_small_part_of_a_large_storage_is_taken_alone(kind, elements):
    """Of a storage of which a tensor is a small part, only that is moved; an expanded one is moved unexpanded."""
    shelf = Shelf()
    with engaged(shelf=shelf):
        kept = read_back(SAVED[kind]())

    assert shelf.sizes == [4 * elements]
    assert kept


def test_views_of_one_storage_are_moved_once():
    """Three interleaved thirds of one projection, and their transposes, are one entry."""
    shelf, whole = Shelf(), big(4, 30)
    parts = [*whole.chunk(3, dim=1), *(part.t() for part in whole.chunk(3, dim=1)), whole]
    with engaged(shelf=shelf):
        kept = [read_back(part) for part in parts]

    assert shelf.sizes == [whole.nbytes]
    assert all(torch.equal(saved, part) for (_, saved), part in zip(kept, parts, strict=True))


def test_the_same_small_part_is_moved_once():
    """A part that is alone, its transpose, and the same part cut again are one entry; another part is another."""
    shelf, whole = Shelf(), big(1000, 10)
    parts = [whole[3:7], whole[3:7].t(), whole.clone()[3:7], whole[3:7].view(2, 20), whole[4:8]]
    with engaged(shelf=shelf):
        kept = [read_back(part) for part in parts]

    assert len(shelf.slots) == 4  # the one that is two rows in shape, and the clone's, are others
    assert all(torch.equal(saved, part) for (_, saved), part in zip(kept, parts, strict=True))


def test_a_part_of_what_was_moved_whole_is_no_second_entry():
    """If the whole storage is there, a small part of it is not taken alone."""
    shelf, whole = Shelf(), big(1000, 10)
    with engaged(shelf=shelf):
        kept = [read_back(part) for part in (whole, whole[3], whole[:, 2])]

    assert shelf.sizes == [whole.nbytes]
    assert all(
        torch.equal(kept[i][1], part) for i, part in enumerate((whole, whole[3], whole[:, 2]))
    )


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("kind", SAVED)
def test_a_codec_keeps_shape_and_strides(kind, name):
    """What a codec stores comes back with the shape, strides and dtype that it had, and near its values."""
    value = SAVED[kind]()
    with engaged(shelf=Shelf(), codec=codec_of(name)):
        y, saved = read_back(value)

    assert (saved.shape, saved.stride(), saved.dtype) == (value.shape, value.stride(), value.dtype)
    assert y.requires_grad
    if value.is_floating_point() and kind != "as halves":
        assert torch.allclose(
            saved.double(),
            value.double(),
            rtol=0.07,
            atol=0.01 * float(value.max()) if len(value.shape) and value.numel() else 0.1,
        )
    elif not value.is_complex() and kind != "as halves":
        assert torch.equal(saved, value)


def test_a_codec_works_without_a_store():
    """With nowhere to move to, what a codec makes stays in memory, in fewer bytes."""
    with engaged(codec=codec_of("int8")) as engine:
        y, saved = read_back(big(100, 100) / 1000)

    moved = engine.account.total
    assert moved.moved["memory"].bytes == 40000
    assert moved.stored.bytes < 11000
    assert torch.allclose(saved, big(100, 100) / 1000, atol=0.05)
    assert y.requires_grad
