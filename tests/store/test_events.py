"""The events of a recording: each line is read as it was written, and what an older or newer version wrote is read as well."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kedge.frames import SourceLine
from kedge.json_input.shape import Misshapen
from kedge.store.events import (
    BadOperation,
    BadTensor,
    BatchSizesEvent,
    Broadcast,
    DropoutCalled,
    DropoutsEvent,
    DumpEvent,
    EndEvent,
    EvaluatedOutputsEvent,
    FrozenEvent,
    FrozenPart,
    GradientsUsedEvent,
    GradsKeptEvent,
    LearningRatesEvent,
    LedgerEvent,
    LedgerLine,
    LoaderWorkers,
    LoggedEvent,
    LossGraphEvent,
    LossLinesEvent,
    LossOperationEvent,
    ModesEvent,
    NonfiniteAtEndEvent,
    NotOptimizedEvent,
    NoWayBackEvent,
    OperationLine,
    OperationsEvent,
    OptimizersEvent,
    OutputSize,
    Position,
    PositionEvent,
    PossibleProducer,
    ProducerEvent,
    RecordedOptimizer,
    RepeatedBatchesEvent,
    RunEvent,
    SavedEvent,
    SharedParametersEvent,
    SnapshotEvent,
    SoftmaxRead,
    StepSkippedEvent,
    UnknownEvent,
    UnseenDetail,
    UnseenEvent,
    event_from,
    kinds,
)
from kedge.store.recording import Recording
from kedge.store.saved_account import BytesOverStep, LineSums, Sums, TotalSums

LINE = SourceLine("train.py", 7, "fit", "loss.backward()")
EVENTS = [
    BatchSizesEvent(step=1, root=0, input="ids", batch=50, others=("pixels",)),
    DropoutsEvent(step=0, site="loss", dropouts=(DropoutCalled(kept=0.03, source=LINE),)),
    DumpEvent(step=3, site="act:out", folder="dump-3", module="act", value="nan", reached=False),
    EvaluatedOutputsEvent(
        step=2, root=0, sizes=(OutputSize(step=2, site=":out", rms=0.5),), initial=("bn",)
    ),
    EndEvent(exit=0, steps=9, seconds=2.5, levels={"skipped": 4}),
    FrozenEvent(step=0, root=0, frozen=8, elements=9, parts=(FrozenPart("body", 8, 8),)),
    GradientsUsedEvent(optimizer=0, steps=9, arrived=2.0, used=1.0, share=0.5, least=1, most=1),
    GradsKeptEvent(step=2, optimizer=1, checked=8, kept=8),
    LedgerEvent(sampled=3, sites=(LedgerLine(site="a:out", fired=0, ungraded="no_grad"),)),
    LoggedEvent(name="val/accuracy", steps=(4, 9), values=(0.5, "nan")),
    LossGraphEvent(
        step=0,
        site="loss",
        nodes=("NllLossBackward0",),
        softmaxes=(
            SoftmaxRead(by="nll_loss", softmax="softmax", dim=0, classes=(1,), shape=(8, 3)),
        ),
        broadcast=Broadcast(by="sub", shape=(8, 1), to=(8, 8)),
    ),
    LearningRatesEvent(step=3, optimizer=1, rates=(0.1, None), names=("decayed", None)),
    LossLinesEvent(
        step=1,
        site="loss",
        operations=(OperationLine(node="SoftmaxBackward0", shape=(8, 3), source=LINE),),
    ),
    LossOperationEvent(step=4, loss="loss", node="AddBackward0", source=LINE),
    ModesEvent(step=0, root=0, training=True, eval=("norm",), eval_calls=(LINE,), rank=2),
    NonfiniteAtEndEvent(
        step=9, count=1, tensors=(BadTensor(path="fc.weight", of="param", nan=1, inf=0),)
    ),
    NoWayBackEvent(step=0, site="quantiser:out[1]", through=("quantiser:out",)),
    NotOptimizedEvent(root=0, training=True, unheld=("fc.weight",), unheld_elements=0),
    OperationsEvent(
        folder="dump-3", operations=(BadOperation(site="act/log:out", name="log", value="nan"),)
    ),
    OptimizersEvent(optimizers=(RecordedOptimizer(index=0, roots=(0,), rates=(0.1,)),)),
    PositionEvent(
        position=Position(step=3, module="fc", direction="backward", source=LINE),
        seen="2026-11-21T07:00:02+00:00",
        since="2026-11-21T07:00:00+00:00",
    ),
    ProducerEvent(step=3, operation="log", among=(PossibleProducer(operation="log"),), of=1),
    RepeatedBatchesEvent(step=0, root=0, times=2, batches=9, loaders=(LoaderWorkers(2, True),)),
    SavedEvent(
        step=0,
        bytes=64,
        modules=(Sums("fc", 2, 64, 64),),
        total=TotalSums(None, 2, 64, 64, inputs=16),
        lines=(LineSums("train.py", 7, "fit"),),
        items=({"path": "fc", "bytes": 64},),
        course=BytesOverStep((64, 0), (1, 2), 64, 1, 2, (("fc", 64), (None, 0))),
        seconds=0.5,
    ),
    SharedParametersEvent(optimizers=(0, 1), parameters=("fc.weight",), count=1, compared=4),
    SnapshotEvent(step=3, code="NAN-BORN", folder="snapshot-3"),
    StepSkippedEvent(step=3, code="NAN-BORN", optimizer=1),
    UnseenEvent(what="failed", detail=UnseenDetail(name="a step", cause="ValueError")),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_an_event_is_read_as_it_was_written(event: RunEvent) -> None:
    """Its line is JSON that begins with its kind, and the reader gives an equal event back."""
    line = event.entry()

    assert next(iter(line.items())) == ("kind", event.kind)
    assert event_from(json.loads(json.dumps(line))) == event


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ({"kind": "end"}, EndEvent()),
        ({"kind": "dump", "step": 1, "site": "a:out", "folder": "d"}, DumpEvent(step=1, site="a:out", folder="d")),
        ({"kind": "producer", "step": 1, "node": "LogBackward0"}, ProducerEvent(step=1, node="LogBackward0")),
        ({"kind": "optimizers", "optimizers": [{}]}, OptimizersEvent(optimizers=(RecordedOptimizer(),))),
    ],
)  # fmt: skip
def test_what_an_older_version_did_not_write_has_its_default(
    line: dict[str, Any], event: RunEvent
) -> None:
    """Only the keys that the first version wrote must be there."""
    assert event_from(line) == event


def test_a_newer_version_may_have_added_keys_and_kinds() -> None:
    """Unknown keys are left out; a line of an unknown kind is passed on whole."""
    assert event_from({"kind": "compiled", "step": 3, "graphs": 2}).entry() == {
        "kind": "compiled",
        "step": 3,
    }
    unknown = event_from({"kind": "weather", "step": 3, "sky": ["blue"]})

    assert isinstance(unknown, UnknownEvent)
    assert unknown.step == 3
    assert unknown.entry() == {"kind": "weather", "step": 3, "sky": ["blue"]}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"step": 3}, "it has no 'kind'"),
        ({"kind": 3}, "kind is 3 but must be text"),
        ({"kind": "weather", "rank": -1}, "rank is -1 but must be a whole number, 0 or more"),
        ({"kind": "compiled"}, "it has no 'step'"),
        ({"kind": "compiled", "step": None}, "step is null but must be a whole number"),
        ({"kind": "ledger", "sites": [{"site": "a"}]}, r"sites\[0\] has no 'fired'"),
        ({"kind": "unseen", "what": "x", "detail": {"steps": "y"}}, r"detail\.steps is 'y'"),
        ({"kind": "saved", "step": 0, "bytes": 0, "modules": [{"path": None}]}, r"modules\[0\] has no 'tensors'"),
        ({"kind": "producer", "step": 0, "where": "input"}, "it has no 'detail'"),
        ({"kind": "operation", "folder": "d", "operations": [{"site": "a", "value": "big"}]},
         r"operations\[0\]\.value is 'big' but must be 'nan' or 'inf'"),
    ],
)  # fmt: skip
def test_a_misshapen_line_is_an_error_that_names_the_key(line: dict[str, Any], said: str) -> None:
    """With its place in the line, and what it must be."""
    with pytest.raises(Misshapen, match=said):
        event_from(line)


def test_events_are_found_by_their_class() -> None:
    """Those of all ranks, each with its rank, in their order."""
    modes = [{"kind": "modes", "step": step, "root": 0, "training": True} for step in (0, 4)]
    recording = Recording.build(events=[modes[0], {"kind": "end"}, {**modes[1], "rank": 3}])
    found = recording.of(ModesEvent)

    assert [(event.step, recording.rank_of(event)) for event in found] == [(0, 0), (4, 3)]
    assert recording.of(DumpEvent) == ()


def test_every_kind_stands_in_the_reference() -> None:
    """docs/reference/recording.md has a paragraph on each."""
    page = Path(__file__).parents[2] / "docs/reference/recording.md"
    described = re.findall(r"^\* `([a-z-]+)`:", page.read_text(encoding="utf-8"), re.MULTILINE)

    assert set(described) == kinds(), "the page has a paragraph on each: * `kind`: ..."
