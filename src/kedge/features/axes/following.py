"""One forward in which each dimension is followed from operation to operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from kedge.features.axes.arguments import Arguments
from kedge.features.axes.axis import Axes, Axis, channels
from kedge.features.axes.operations import follow
from kedge.flow import Event
from kedge.hooks.session import Session
from kedge.sites.site import escape
from kedge.torch_internals.modes import seeing_operations
from kedge.torch_internals.module_tables import modules_in

_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)
_SEQUENCE = 3


@contextmanager
def followed(model: nn.Module, given: Arguments) -> Iterator[Axes]:
    """Context of a forward; the dimensions of tensors are known while they exist."""
    axes = Axes()
    axes.put_parameters(model)
    for name, value in given.tensors.items():
        mine = [Axis(sources=frozenset({(name, dim)})) for dim in range(value.dim())]
        if (dim := given.sample_dim(value)) is not None:
            mine[dim].kind = "samples"
        axes.put(value, mine)
    session = Session()
    try:
        for path, module in modules_in(model).items():
            _declare(session, model, axes, path, module, counted=given.counted)
        with seeing_operations(lambda *call: follow(axes, *call)):
            yield axes
    finally:
        session.end(quiet=True)


def _declare(
    session: Session, model: nn.Module, axes: Axes, path: str, module: nn.Module, *, counted: bool
) -> None:
    """Let a module of PyTorch say what its operations do not: which dimension of its input is the sequence.

    Encoders with ``batch_first=True`` get no hook at their inputs, because it would keep PyTorch
    from their fast path.
    """
    first = getattr(module, "batch_first", None)
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        first = module.self_attn.batch_first

    def at_input(value: Tensor, event: Event) -> None:
        if (
            event.site.leaf in ("input", "query", "key", "value", "src", "tgt", "memory")
            and value.dim() == _SEQUENCE
        ):
            sequence, samples, *_ = axes.of(value)
            if not counted or value.shape[0] == value.shape[1] or sequence.kind != "samples":
                sequence.kind, samples.kind = "positions", "samples"

    def at_output(value: Tensor, event: Event) -> None:
        given = event.args[0] if event.args else event.kwargs.get("src", event.kwargs.get("input"))
        if (
            event.site.leaf in (None, "0")
            and isinstance(given, Tensor)
            and given.shape[:2] == value.shape[:2]
        ):
            lead = axes.of(given)[:2]
            axes.of(value)[:] = [*lead, *(channels() for _ in range(value.dim() - len(lead)))]

    here = escape(path)
    if first is False:
        session.hook(model, f"{here}:in", at_input)
    if isinstance(module, (*_RECURRENT, nn.TransformerEncoder)):
        session.hook(model, f"{here}:out", at_output)
