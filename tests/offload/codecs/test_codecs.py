import math
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.errors import NoSuchCodec
from kedge.offload.codecs import CODECS, codec_of
from kedge.offload.codecs.blocks import BLOCK

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NARROW = [torch.int8, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn, torch.complex64]


def through(name, value):
    """Encode and decode; what was kept, and what came back."""
    codec = codec_of(name)
    kept, extra = codec.encode(value)
    assert kept.dim() == 1
    assert kept.is_contiguous()
    assert kept.dtype is torch.uint8
    return kept, codec.decode(kept.clone(), extra)


def same_place(back, value):
    """Whether a tensor has the shape, strides, dtype and device of another."""
    return (back.shape, back.stride(), back.dtype, back.device) == (
        value.shape,
        value.stride(),
        value.dtype,
        value.device,
    )


def by_block(value):
    """Cut a one-dimensional tensor into the blocks of a codec, the last one filled up with zeros, in float64."""
    return torch.nn.functional.pad(value.double(), (0, -len(value) % BLOCK)).view(-1, BLOCK)


magnitudes = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from(
        [0.0, -0.0, 3.4028234663852886e38, -3.4028234663852886e38, 1e-45, 1.1754944e-38, 1.0]
    ),
)


@st.composite
def vectors(draw, elements=magnitudes):
    """Vectors of float32 of one to three blocks, of a few values in some order."""
    few = draw(st.lists(elements, min_size=1, max_size=8))
    size = draw(st.integers(BLOCK, 3 * BLOCK))
    seed = draw(st.integers(0, 2**16))
    picks = torch.randint(len(few), (size,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(few, dtype=torch.float32)[picks]


@settings(max_examples=150, deadline=None)
@given(value=vectors())
def test_int8_is_off_by_half_a_step_at_most(value):
    """Within each block of 256 the error is at most 1/254 of the largest magnitude, over the whole range of float32."""
    _, back = through("int8", value)
    bound = (
        by_block(value).abs().amax(1, keepdim=True) / 254 * (1 + 1e-6)
        + torch.finfo(torch.float32).tiny / 2
    )

    assert back.isfinite().all()
    assert ((by_block(back) - by_block(value)).abs() <= bound).all()


@settings(max_examples=150, deadline=None)
@given(value=vectors())
def test_fp8_is_off_by_a_sixteenth_at_most(value):
    """The error is at most 1/16 of each value, or 1/458752 of the largest in its block, over the whole range."""
    _, back = through("fp8", value)
    blocks = by_block(value).abs()
    floor = blocks.amax(1, keepdim=True) / 458752 + torch.finfo(torch.float32).tiny / 1024
    bound = torch.maximum(blocks / 16, floor) * (1 + 1e-6)

    assert back.isfinite().all()
    assert ((by_block(back) - by_block(value)).abs() <= bound).all()


@settings(max_examples=100, deadline=None)
@given(value=vectors(st.floats(width=32, min_value=-(2.0**127), max_value=2.0**127)))
def test_bf16_is_off_by_a_part_in_256_at_most(value):
    """The error is at most 1/256 of each value; below the smallest normal number, half of bfloat16's step there."""
    _, back = through("bf16", value)
    bound = torch.maximum(value.double().abs() / 256, torch.tensor(2.0**-134, dtype=torch.float64))

    assert ((back.double() - value.double()).abs() <= bound).all()


@settings(max_examples=100, deadline=None)
@given(value=vectors(st.sampled_from([math.nan, math.inf, -math.inf, 1.0, -0.5, 3e38, 1e-40, 0.0])))
@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_comes_back_as_it_was(name, value):
    """A NaN stays a NaN, an infinity stays that infinity, and nothing finite becomes either."""
    _, back = through(name, value)

    assert torch.equal(back.isnan(), value.isnan())
    assert torch.equal(back.isposinf(), value.isposinf())
    assert torch.equal(back.isneginf(), value.isneginf())


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_finite_values_keep_their_precision_beside_a_nan(name):
    """One NaN and one infinity cost their block one code, not its values."""
    value = torch.linspace(-3, 3, BLOCK)
    value[[7, 90]] = torch.tensor([math.nan, math.inf])
    _, back = through(name, value)
    rest = value.isfinite()

    assert (
        (back - value)[rest].abs() <= torch.maximum(value[rest].abs() / 16, torch.tensor(3 / 250))
    ).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_the_largest_number_of_a_dtype_stays_finite(name, dtype):
    """A block's peak comes back no larger than it was, so that it cannot overflow."""
    most = torch.finfo(dtype).max
    value = torch.full((BLOCK + 3,), most, dtype=dtype)
    value[::2] = -most
    _, back = through(name, value)

    assert back.isfinite().all()
    assert torch.allclose(back.double() / most, value.double() / most, rtol=0.01)


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3),
    "permuted": lambda x: x.permute(2, 0, 3, 1),
    "with gaps": lambda x: x[:, ::2, 1:, :7],
    "every second": lambda x: x[..., ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "expanded in front": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "of one": lambda x: x[:1, :, :1].transpose(0, 1),
    "transposed, with gaps": lambda x: x.transpose(1, 2)[:, 2:6],
    "with an offset": lambda x: x.view(-1)[13:2013],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CODECS)
def test_strides_come_back(name, layout, dtype):
    """What comes back has shape, strides and dtype of what went in, and the right element in each place."""
    value = LAYOUTS[layout](torch.randn(4, 8, 10, 40).to(dtype))
    if name == "bf16" and dtype is not torch.float32:
        assert codec_of(name).encode(value) is None
        return
    _, back = through(name, value)

    assert same_place(back, value)
    assert torch.allclose(back.float(), value.float(), atol=0.05, rtol=0.07)


def test_an_expanded_tensor_is_stored_once():
    """A dimension of stride 0 costs nothing."""
    value = torch.randn(1000, 1).expand(1000, 50)
    kept, _ = through("bf16", value)

    assert kept.nbytes == 2000


def test_elements_that_share_memory_are_declined():
    """Overlapping windows are left to be kept as they are, also if they have no more than their ends in common."""
    for windows in (torch.randn(4000).unfold(0, 512, 100), torch.randn(1001).unfold(0, 101, 100)):
        assert [codec.encode(windows) for codec in CODECS.values()] == [None] * 3


@pytest.mark.parametrize("name", CODECS)
def test_elements_that_lie_side_by_side_are_taken(name):
    """Windows that only touch share nothing."""
    windows = torch.randn(1000).unfold(0, 100, 100)
    _, back = through(name, windows)

    assert back.stride() == windows.stride()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", CODECS)
def test_what_is_no_float_of_16_bits_is_declined(name, dtype):
    """Integers, masks, complex numbers and what is narrow already are left as they are."""
    assert codec_of(name).encode(torch.zeros(1000).to(dtype)) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_bf16_takes_float32_alone(dtype):
    """A cast that saves nothing, or that loses float64's range, is declined."""
    assert codec_of("bf16").encode(torch.ones(1000, dtype=dtype)) is None


@pytest.mark.parametrize("name", CODECS)
def test_nothing_and_too_little_are_declined_or_come_back(name):
    """An empty tensor is declined; one of less than a block comes back or is declined, never wrong."""
    assert codec_of(name).encode(torch.empty(0)) is None
    found = codec_of(name).encode(torch.ones(3))
    assert (found is None) == (name != "bf16")


@pytest.mark.parametrize(("name", "most"), [("bf16", 0.5), ("fp8", 0.2540), ("int8", 0.2540)])
def test_as_few_bytes_are_kept_as_is_said(name, most):
    """Half of float32's bytes for bf16; a quarter, and a scale of 4 bytes for 256, for the others."""
    value = torch.randn(1 << 16)
    kept, _ = through(name, value)

    assert kept.nbytes <= most * value.nbytes


@pytest.mark.parametrize("name", CODECS)
def test_encoding_is_not_recorded_by_autograd(name):
    """A tensor that needs a gradient is encoded and decoded outside of any graph, and is not changed."""
    value = torch.randn(1000, requires_grad=True)
    before = value.detach().clone()
    kept, back = through(name, value)

    assert not kept.requires_grad
    assert not back.requires_grad
    assert torch.equal(before, value)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_large_tensor_is_encoded_in_pieces(name):
    """What is cut into pieces comes back like what is encoded at once, with a rest that is no whole block."""
    value = torch.randn(3 * (1 << 18) + 77)
    _, back = through(name, value)
    tail = value[-(77 + BLOCK) :].clone()
    _, alone = through(name, tail)

    assert torch.equal(back[-(77 + BLOCK) :], alone)


def test_an_unknown_codec_is_named():
    """The message says what was asked and lists what there is."""
    with pytest.raises(
        NoSuchCodec, match="codec='zip': use 'bf16', 'fp8', 'int8', or None for no loss"
    ):
        codec_of("zip")


def test_how_fast_they_are(capsys):
    """Each codec's rate is printed; nothing is asserted on time."""
    value = torch.randn(1 << 22)
    for name in CODECS:
        rates = []
        for _ in range(3):
            begin = time.perf_counter()
            kept, extra = codec_of(name).encode(value)
            middle = time.perf_counter()
            codec_of(name).decode(kept, extra)
            rates.append(
                (
                    value.nbytes / 1e6 / (middle - begin),
                    value.nbytes / 1e6 / (time.perf_counter() - middle),
                )
            )
        with capsys.disabled():
            encoding, decoding = (max(column) for column in zip(*rates, strict=True))
            sys.stdout.write(
                f"\n  {name}: encodes {encoding:.0f} MB/s, decodes {decoding:.0f} MB/s"
            )
    assert set(CODECS) == {"bf16", "fp8", "int8"}
