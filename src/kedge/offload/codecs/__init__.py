"""Lossy codecs for saved tensors: 16 bits a number, or 8 with a scale for each block."""

from kedge.errors import NoSuchCodec
from kedge.offload.codecs.blocks import Fp8, Int8
from kedge.offload.codecs.cast import Bf16
from kedge.offload.codecs.codec import Codec

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Bf16(), Fp8(), Int8())}

__all__ = ["CODECS", "Codec", "codec_of"]


def codec_of(name: str) -> Codec:
    """Return the codec of this name.

    Raises:
        NoSuchCodec: There is no codec of this name.
    """
    if name not in CODECS:
        raise NoSuchCodec(
            f"codec={name!r}: use {', '.join(map(repr, CODECS))}, or None for no loss"
        )
    return CODECS[name]
