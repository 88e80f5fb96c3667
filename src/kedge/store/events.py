"""The events of a recording, the lines of ``events.jsonl``.

Each kind is one class here, and nothing else knows it as a text. A class says what its lines
contain, and how they are written and checked: see `kedge.json_input.classes`. What each kind means
to readers of the file stands in docs/reference/recording.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self

from kedge.frames import SourceLine
from kedge.json_input.classes import AnyNumber, Count, PlainName, Total, as_json, left_out, read_as
from kedge.json_input.shape import Misshapen, fields, text
from kedge.store.saved_account import BytesOverStep, LineSums, SavedAccount, Sums, TotalSums


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """One event of a run.

    Attributes:
        kind: The kind, as files have it.
        step: The step; None if it is of none.
        rank: The rank that wrote it; None for the lowest.
    """

    kind: ClassVar[str] = ""
    step: int | None = left_out(None)
    rank: Count | None = left_out(None)

    def __init_subclass__(cls) -> None:
        if cls.kind:
            _KINDS[cls.kind] = cls

    def entry(self) -> dict[str, Any]:
        """Return the event as it is written."""
        return {"kind": self.kind, **as_json(self)}


_KINDS: dict[str, type[RunEvent]] = {}
_check_kind = fields({"kind": text})


def kinds() -> set[str]:
    """Return the kinds of events that this version writes."""
    return set(_KINDS)


def event_from(line: Any) -> RunEvent:
    """Return the event of a line.

    Raises:
        Misshapen: The line is not one of this kind.
    """
    _check_kind(line)
    kind = _KINDS.get(line["kind"])
    if kind is not None:
        return read_as(kind, line)
    known = read_as(RunEvent, line)
    return UnknownEvent(content=line, step=known.step, rank=known.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent(RunEvent):
    """An event of a kind that a later version has added; it is passed on as it is."""

    content: Mapping[str, Any]

    def entry(self) -> dict[str, Any]:
        """Return the event as it was read."""
        return {**self.content, **as_json(RunEvent(step=self.step, rank=self.rank))}


# -- the run -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteEvent(RunEvent):
    """A sentence for the reader."""

    kind = "note"
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvent(RunEvent):
    """Numbers that the program logged under one name, since the last such event."""

    kind = "logged"
    name: str
    steps: tuple[int, ...]
    values: tuple[AnyNumber, ...]

    def __post_init__(self) -> None:
        """Raises `Misshapen` if there is not one value for each step."""
        if len(self.steps) != len(self.values):
            raise Misshapen(f"has {len(self.steps)} steps but {len(self.values)} values")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTimesEvent(RunEvent):
    """The seconds that each called module took in one measured step, all its calls together.

    Attributes:
        step: The step.
        paths: The modules, the outer ones first.
        forward: Seconds of the forward, without Kedge's own.
        backward: Seconds of the operations that the module's gradients came from; None if no
            backward was seen.
    """

    kind = "module-times"
    step: int
    paths: tuple[str, ...]
    forward: tuple[float | None, ...]
    backward: tuple[float | None, ...]

    def __post_init__(self) -> None:
        """Raises `Misshapen` if there is not one time of each kind for each module."""
        if not len(self.paths) == len(self.forward) == len(self.backward):
            raise Misshapen(
                f"has {len(self.paths)} modules, {len(self.forward)} times of the forward and "
                f"{len(self.backward)} of the backward"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedEvent(RunEvent):
    """A rank other than 0 began to write."""

    kind = "joined"
    started: str | None = None
    pid: int | None = None
    host: str | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenDetail:
    """What is known of work that was not watched: of child processes, or of what failed and why."""

    steps: Count | None = left_out(None)
    seconds: float | None = left_out(None)
    name: str | None = left_out(None)
    cause: str | None = left_out(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenEvent(RunEvent):
    """Work of the program that could not be watched.

    It is of ``children`` or ``hook-tables``, or what ``failed``.
    """

    kind = "unseen"
    what: str
    detail: UnseenDetail | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """The firings of a site, or why there were none.

    Attributes:
        ungraded: Why the outputs of the module of a parameter have no gradient.
    """

    site: str
    fired: Count
    cause: str = ""
    remedy: str = ""
    ungraded: str | None = left_out(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEvent(RunEvent):
    """The sites that never fired."""

    kind = "ledger"
    sampled: Count = 0
    sites: tuple[LedgerLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedEvent(RunEvent):
    """A step could not be written, and the program went on unrecorded."""

    kind = "stopped"
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a program was.

    Attributes:
        step: The step.
        module: The innermost module whose call ran; empty for the model itself, None outside of
            modules. A module that no model holds is its class.
        direction: ``backward`` in a backward pass, else ``forward`` in a module; None outside of
            both.
        source: The innermost line of the program's own code.
    """

    step: Count
    module: str | None = None
    direction: Literal["forward", "backward"] | None = None
    source: SourceLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionEvent(RunEvent):
    """Where the program was when it was last looked at; it is in a file of its own.

    Attributes:
        position: The place.
        seen: The time of the last look.
        since: The time of the first one that found it there, with all looks between them.
    """

    kind = "position"
    position: Position
    seen: str
    since: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEvent(RunEvent):
    """The end of the run, as far as Kedge saw it; what an older version did not write is None.

    Attributes:
        position: Where the error came that ended it.
    """

    kind = "end"
    exit: int | None = None
    steps: Count | None = None
    sampled: Count | None = None
    seconds: float | None = None
    watching: float | None = None
    slowdown: float | None = None
    levels: Mapping[str, Count] | None = None
    error: str | None = None
    position: Position | None = left_out(None)


# -- the training --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledEvent(RunEvent):
    """There was code of ``torch.compile`` after this step."""

    kind = "compiled"
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModesEvent(RunEvent):
    """The modules of a root that compute differently in training, by their mode.

    Attributes:
        eval_calls: In evaluation mode: the lines of the program that call ``.eval()``, as its
            source has them.
    """

    kind = "modes"
    step: int
    root: Count
    training: bool
    eval: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    eval_calls: tuple[SourceLine, ...] = left_out(())


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveDropout:
    """A call of dropout that was active in evaluation mode.

    Attributes:
        function: The name of the function that was called.
        share: The share of elements that it drops.
        module: The path of the module whose forward called it; None if that is not known.
        file: The file of the call.
        line: The line in it.
        text: The line itself; None if it cannot be read.
    """

    function: str
    share: float
    module: str | None = None
    file: str
    line: int
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSize:
    """How large the output of an evaluation was.

    Attributes:
        step: The step.
        site: The site of the output.
        rms: Its root mean square, of up to 1,024 elements.
    """

    step: Count
    site: str
    rms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedOutputsEvent(RunEvent):
    """The outputs of some evaluations of a root, at the end of the run.

    Of one that no optimizer trains, only if it has `initial` ones.

    Attributes:
        step: The step of the first one.
        sizes: How large they were.
        estimates: The paths of modules that compute with what they estimated in training, such as
            batch norms.
        initial: The paths of modules whose running mean was 0, and the variance 1, in the last one.
    """

    kind = "evaluated-outputs"
    step: int
    root: Count
    sizes: tuple[OutputSize, ...]
    estimates: tuple[str, ...] = ()
    initial: tuple[str, ...] = left_out(())


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEvent(RunEvent):
    """The forward passes of a trained root in a row without gradients, at the end of the run.

    Attributes:
        step: The step of the first one.
        passes: How many they were.
        as_training: In how many of them modules computed as in training.
        train: The paths of these modules.
        dropout: Calls of dropout that were active in evaluation mode.
    """

    kind = "evaluation"
    step: int
    root: Count
    passes: Count
    as_training: Count = 0
    train: tuple[str, ...] = ()
    dropout: tuple[ActiveDropout, ...] = left_out(())


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLoaderSeen:
    """A data loader of the program."""

    batch_size: int | None = None
    batches: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizesEvent(RunEvent):
    """One input of a root has a first size of one where others have a batch, and changes from step to step.

    Attributes:
        step: The first step in which it was seen.
        input: The name of that input.
        batch: The first size of the others.
        others: Their names.
    """

    kind = "batch-sizes"
    step: int
    root: Count
    input: str
    batch: Count
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedInputsEvent(RunEvent):
    """The inputs of a root were the same in all measured steps in which they were compared.

    Attributes:
        step: The first of these steps.
        compared: How many later ones were compared with it.
        batch: The first size of the inputs.
        loaders: The data loaders that existed then.
    """

    kind = "repeated-inputs"
    step: int
    root: Count
    compared: Count
    batch: Count = 0
    loaders: tuple[DataLoaderSeen, ...] = ()


@dataclass(frozen=True, slots=True)
class LoaderWorkers:
    """A data loader with several workers: their number, and whether its data set is a stream, which each runs through.

    Of a loader that is gone, it is the number of child processes, and its data set is not known.
    """

    workers: Count
    stream: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedBatchesEvent(RunEvent):
    """The inputs of a root came several times in a row, each as often, while data loaders had workers.

    Attributes:
        step: The first step in which they were compared with those of the next one.
        times: How often each came.
        batches: How many of them came so often.
        loaders: The data loaders with several workers.
    """

    kind = "repeated-batches"
    step: int
    root: Count
    times: Count
    batches: Count
    loaders: tuple[LoaderWorkers, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GradsKeptEvent(RunEvent):
    """Gradients that an optimizer used still held those of its last step."""

    kind = "grads-kept"
    step: int
    optimizer: Count = 0
    checked: Count
    kept: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsUsedEvent(RunEvent):
    """The norm of an optimizer's gradients: as backward passes left it, and when the optimizer used it.

    Attributes:
        optimizer: Its number.
        steps: In how many measured steps both are known.
        arrived: The median of the former, without the scale of a GradScaler.
        used: The median of the latter.
        share: The median share that was left.
        scale: The scale in the last of these steps; None without a GradScaler.
        least: The least of the latter, times the scale of its step.
        most: The largest one.
    """

    kind = "gradients-used"
    optimizer: Count
    steps: Count
    arrived: float
    used: float
    share: float
    scale: float | None = left_out(None)
    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOptimizer:
    """One optimizer of the program, with the learning rates of its first step.

    With `by_hand` it is the program itself, which changes the parameters of one root.
    """

    index: Count | None = None
    type: str = "an optimizer"
    steps: Count = 0
    parameters: Count = 0
    roots: tuple[Count, ...] = ()
    rates: tuple[float, ...] = ()
    first_step: int | None = None
    by_hand: bool = left_out(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizersEvent(RunEvent):
    """The optimizers of the program, at the end of the run."""

    kind = "optimizers"
    optimizers: tuple[RecordedOptimizer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRatesEvent(RunEvent):
    """From this measured step on, an optimizer steps with other learning rates.

    Attributes:
        optimizer: The number of the optimizer.
        rates: The rate of each of its groups; None for one that is not known.
        names: The name of each group, if the program gives its groups names.
    """

    kind = "learning-rates"
    step: int
    optimizer: Count = 0
    rates: tuple[float | None, ...]
    names: tuple[str | None, ...] = left_out(())


@dataclass(frozen=True, slots=True, kw_only=True)
class NotOptimizedEvent(RunEvent):
    """Parameters of a root that no optimizer holds; with a root of None, what concerns none of them.

    Attributes:
        unheld: The trainable parameters that no optimizer holds.
        unheld_elements: The number of their elements.
        graded: Those of them that got a gradient.
        replaced: Names under which an optimizer holds another tensor.
        outside: The classes of modules that the root calls without holding them.
        outside_fixed: Whether all of these are in evaluation mode.
        tensors: Tensors with gradients that are not parameters.
        passes: The number of backward passes that reached the unheld parameters.
        foreign: The number of optimizers' parameters that belong to no root.
        in_vain: After how many backward passes no existing optimizer had stepped.
    """

    kind = "not-optimized"
    root: Count | None = None
    training: bool | None = left_out(None)
    unheld: tuple[str, ...] = left_out(())
    unheld_elements: Total | None = left_out(None)
    graded: tuple[str, ...] = left_out(())
    replaced: tuple[str, ...] = left_out(())
    outside: tuple[str, ...] = left_out(())
    outside_fixed: bool = left_out(False)
    tensors: tuple[str, ...] = left_out(())
    passes: Count = left_out(0)
    foreign: Count = left_out(0)
    in_vain: Count = left_out(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParametersEvent(RunEvent):
    """Two optimizers that hold the same parameters stepped in turn.

    Attributes:
        optimizers: Their numbers.
        parameters: The parameters that both hold.
        count: How many these are.
        compared: In how many measured steps of the run both stepped, with gradients.
        same: In how many of them the second one used gradients that the first one had used.
    """

    kind = "shared-parameters"
    optimizers: tuple[Count, ...]
    parameters: tuple[str, ...] = ()
    count: Count
    compared: Count = 0
    same: Count = 0


@dataclass(frozen=True, slots=True)
class FrozenPart:
    """A child of a root, or a parameter of its own: its elements, and how many of them are frozen."""

    path: str
    elements: Count
    frozen: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenEvent(RunEvent):
    """Most elements of a trained root had requires_grad False, from this step to the end.

    Attributes:
        frozen: How many of its elements.
        elements: How many it has.
        weights: How many of the frozen ones are in weights whose spread was judged.
        even: How many of these are in weights that are spread evenly between two bounds.
        beside: How many of the frozen ones stand beside trained ones, as those of adapters do.
        parts: The children of the root.
    """

    kind = "frozen"
    step: int
    root: Count
    frozen: Count
    elements: Count
    weights: Count = 0
    even: Count = 0
    beside: Count = 0
    parts: tuple[FrozenPart, ...] = ()


# -- the loss ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxRead:
    """A softmax, and an operation that takes classes from its result, or is a softmax of it.

    Attributes:
        by: The name of that operation.
        softmax: ``softmax`` or ``log_softmax``.
        dim: The dimension over which the softmax ran.
        classes: The dimensions of its result in which those that the operation reads along may be.
        shape: The shape of its result.
    """

    by: str
    softmax: str
    dim: Count
    classes: tuple[Count, ...]
    shape: tuple[Count, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """An operation of a loss that spreads predictions over a square, with each target beside each of them.

    Attributes:
        by: The name of the operation.
        shape: The shape of the predictions.
        to: The shape of the result.
    """

    by: str
    shape: tuple[Count, ...]
    to: tuple[Count, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoWayBackEvent(RunEvent):
    """A module's output that a loss uses, and from which no gradient comes back to the module's input.

    Attributes:
        step: The step whose graph shows it.
        site: The output.
        through: The numbers that the module returned as well, and from which one does.
    """

    kind = "no-way-back"
    step: int
    site: str
    through: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutCalled:
    """A dropout, of a module or of a function that a forward calls.

    Attributes:
        kept: The share of elements that it keeps.
        source: The program's line; None if it is not known.
    """

    kept: float
    source: SourceLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutsEvent(RunEvent):
    """The dropouts behind a loss of which layers take the results, as far as they are known.

    It comes again with their lines once these are known.
    """

    kind = "dropouts"
    step: int
    site: str
    dropouts: tuple[DropoutCalled, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGraphEvent(RunEvent):
    """The autograd nodes behind a loss, along the first input of each that needs a gradient.

    Attributes:
        softmaxes: What is read of the softmaxes anywhere behind it, as far as that is known.
        broadcast: How the loss pairs each prediction with each target; None if it does not.
        unscaled: Whether the loss is recorded without a scaler's scale.
        ascends: Whether the program makes it large: backward began with a negative number.
    """

    kind = "loss-graph"
    site: str = "loss"
    nodes: tuple[str, ...] = ()
    softmaxes: tuple[SoftmaxRead, ...] = left_out(())
    broadcast: Broadcast | None = left_out(None)
    unscaled: bool = False
    ascends: bool = left_out(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationLine:
    """The program's line of an operation behind a loss.

    Attributes:
        node: The name of its autograd node.
        shape: The shape of its result; None if that is not known.
        source: The line; None if it is not known.
    """

    node: str
    shape: tuple[Count, ...] | None = left_out(None)
    source: SourceLine | None = left_out(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLinesEvent(RunEvent):
    """The program's lines of the operations that the graph of a loss names.

    Attributes:
        operations: First those along the first input of each, as in the event of the graph, then
            other softmaxes.
    """

    kind = "loss-lines"
    step: int
    site: str
    operations: tuple[OperationLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOperationEvent(RunEvent):
    """From this step on a loss is made by another operation or on another line.

    It is any loss, of unknown ones, if it is None.
    """

    kind = "loss-operation"
    step: int
    loss: str | None = None
    node: str | None = None
    source: SourceLine | None = None


# -- a program of tensors ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorValue:
    """What a tensor was.

    Attributes:
        shape: Its shape.
        dtype: Its type of numbers, such as ``float32``.
        text: Its numbers, or the least, the largest and the mean of many; empty if they were not
            read.
        nonfinite: How many of them are infinite or NaN.
    """

    shape: tuple[Count, ...]
    dtype: str
    text: str = left_out("")
    nonfinite: Count = left_out(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedForBackward:
    """A tensor that an operation keeps for backward.

    Attributes:
        name: Its name in the node; empty for what a function of the program keeps.
        shape: Its shape; None if a pair of hooks has packed it.
        bytes: The bytes that no operation before keeps, too.
    """

    name: str
    shape: tuple[Count, ...] | None = None
    bytes: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNode:
    """A tensor of a graph: a leaf, a constant, or the result of an operation.

    Attributes:
        name: The operation, ``leaf`` or ``constant``.
        variable: The program's variable that holds the tensor; empty without one.
        takes: The places of the tensors that the operation takes.
        source: The program's line of the operation.
        value: What it was at first.
        last: What it was in the last pass; None if there was one pass only.
        gradient: The gradient that backward has computed for it, at first.
        last_gradient: That of the last pass.
        kept: What ``.grad`` was after the last pass; None if there was none.
        saved: What the operation keeps for backward.
    """

    kind: Literal["operation", "leaf", "constant"]
    name: str
    variable: str = left_out("")
    takes: tuple[Count, ...] = left_out(())
    source: SourceLine | None = left_out(None)
    value: TensorValue | None = left_out(None)
    last: TensorValue | None = left_out(None)
    gradient: TensorValue | None = left_out(None)
    last_gradient: TensorValue | None = left_out(None)
    kept: TensorValue | None = left_out(None)
    saved: tuple[SavedForBackward, ...] = left_out(())


@dataclass(frozen=True, slots=True, kw_only=True)
class HookFiring:
    """One call of a hook.

    Attributes:
        at: Which backward pass it was, from 0.
        order: Its place among the calls of hooks in that pass.
        given: The value that it was called with.
        did: Whether it returned nothing, returned another value, changed the value in place, or
            raised an error.
        result: The value after it, unless it is the same.
    """

    at: Count
    order: Count
    given: TensorValue | None = None
    did: Literal["nothing", "returned", "changed", "raised"] = "nothing"
    result: TensorValue | None = left_out(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHook:
    """A hook that the program has set on a tensor or on an autograd node.

    Attributes:
        node: The place of the tensor in `TensorGraphEvent.nodes`.
        kind: As `kedge.audit` names it: ``tensor``, ``post-accumulate``, ``node-pre``,
            ``node-post``; or ``retain-grad``.
        name: The name of the function.
        owner: Its file and line, or its library.
        times: How often it was called.
        firings: The first calls, and the last one.
        removed: Whether the program has removed it.
    """

    node: Count
    kind: str
    name: str
    owner: str
    times: Count = 0
    firings: tuple[HookFiring, ...] = ()
    removed: bool = left_out(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGraphEvent(RunEvent):
    """The graph of some backward passes of a program without modules that are all alike.

    Or, of a program without a backward pass, that of its first operations.

    Attributes:
        began: What made it: ``backward``, ``grad`` (of `torch.autograd`), or ``forward``.
        first: Which pass was the first one, from 0.
        passes: How many passes were alike.
        failed: How many of them ended with an error.
        roots: The places of the tensors that it began at.
        source: The program's line that called backward.
        nodes: The tensors, each after those that it takes.
        hooks: The hooks of the program.
        left_out: How many operations are not among the nodes.
    """

    kind = "tensor-graph"
    began: Literal["backward", "grad", "forward"]
    first: Count = 0
    passes: Count = 0
    failed: Count = left_out(0)
    roots: tuple[Count, ...] = ()
    source: SourceLine | None = left_out(None)
    nodes: tuple[TensorNode, ...] = ()
    hooks: tuple[TensorHook, ...] = left_out(())
    left_out: Count = left_out(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorProgramEvent(RunEvent):
    """What was seen of a program before it called a module.

    Attributes:
        operations: How many operations it made.
        passes: How many backward passes.
        until: Why no more was seen: the program's ``end``, a ``module`` that it called, a
            ``profiler`` or trace that began, or the ``limit`` of what is looked at.
        graphs: How many kinds of passes were not recorded, beside those of `TensorGraphEvent`.
    """

    kind = "tensor-program"
    operations: Count
    passes: Count
    until: Literal["end", "module", "limit", "profiler"]
    graphs: Count = left_out(0)


# -- values that are not finite ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BadBackwardEvent(RunEvent):
    """A backward pass of a finite loss left gradients that are not finite, in an unmeasured step."""

    kind = "bad-backward"
    step: int
    loss: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PossibleProducer:
    """One of several operations that may have made a value."""

    operation: str
    node: str | None = None
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerEvent(RunEvent):
    """The operation that made a loss or its gradients not finite.

    Attributes:
        module: The module that it lies in; empty outside of modules, None if that is not known.
        where: ``forward``, ``backward``, ``hidden`` (in the forward, but not shown by the loss),
            ``unseen`` (in the forward, of which no value was read), or ``input`` if the value came
            in with the batch.
        certain: Whether it was seen, and not only inferred.
        again: Whether it was seen when the lines of the step ran again in a copy of the process.
        among: The last of several operations that may have made it, in the order of the forward.
        of: How many they are.
    """

    kind = "producer"
    step: int
    loss: str | None = None
    operation: str | None = None
    node: str | None = None
    module: str | None = None
    where: str | None = None
    file: str | None = None
    line: int | None = None
    function: str | None = left_out(None)
    text: str | None = None
    detail: str | None = None
    certain: bool = True
    again: bool = left_out(False)
    among: tuple[PossibleProducer, ...] = left_out(())
    of: Count = left_out(0)

    def __post_init__(self) -> None:
        """Check that a value from outside is described."""
        if self.where == "input" and self.detail is None:
            raise Misshapen("has no 'detail'")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShare:
    """One row of a batch, and its shares of the loss and of the norm of the gradients.

    Attributes:
        sample: Its number in the data set, as its loader's sampler had it; None if that is not known.
    """

    row: Count
    loss: float
    gradient: float | None = left_out(None)
    sample: Count | None = left_out(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsEvent(RunEvent):
    """The rows of a batch that made its loss jump, as its lines showed when they ran again with some rows alone.

    Attributes:
        loss: The path of the loss.
        of: The number of rows of the batch.
        rows: Those with the largest shares; none if no few rows carry it.
    """

    kind = "rows"
    step: int
    loss: str | None = None
    of: Count
    rows: tuple[RowShare, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallBatchEvent(RunEvent):
    """A loss jumped in a step whose batch had fewer samples than the first one, by the graphs of both.

    Attributes:
        loss: The path of the loss.
        samples: The samples of the step's batch.
        usual: Those of the first batch.
    """

    kind = "small-batch"
    step: int
    loss: str
    samples: Count
    usual: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpEvent(RunEvent):
    """A call was kept in a folder of the recording, with a script that runs it again.

    Attributes:
        module: The module that was called; None in recordings of earlier versions.
        reached: Whether the optimizer was about to get the values.
    """

    kind = "dump"
    step: int
    site: str
    folder: PlainName
    module: str | None = None
    value: str | None = None
    direction: str | None = None
    reached: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStepEvent(RunEvent):
    """A backward pass of a step was kept in a folder of the recording, so that it can run again.

    Attributes:
        folder: The folder.
    """

    kind = "kept-step"
    step: int
    folder: PlainName


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotEvent(RunEvent):
    """Parameters, buffers, optimizers and random numbers were kept in a folder of the recording.

    Attributes:
        code: The code of the rule whose finding asked for it.
        folder: The folder.
    """

    kind = "snapshot"
    step: int
    code: str
    folder: PlainName


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSkippedEvent(RunEvent):
    """An optimizer's step was not taken, because of a finding.

    Attributes:
        code: The code of the rule.
        optimizer: The number of the optimizer.
    """

    kind = "step-skipped"
    step: int
    code: str
    optimizer: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BadOperation:
    """An operation that made a value of a kept call, with the program's line."""

    site: str
    name: str = ""
    value: Literal["nan", "inf"]
    file: str | None = left_out(None)
    line: int | None = left_out(None)
    function: str | None = left_out(None)
    text: str | None = left_out(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationsEvent(RunEvent):
    """The operations that made the value of a kept call, when it was run again."""

    kind = "operation"
    folder: PlainName
    operations: tuple[BadOperation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadTensor:
    """A parameter or buffer with elements that are not finite."""

    path: str
    of: Literal["param", "buffer"]
    nan: Count
    inf: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteAtEndEvent(RunEvent):
    """Trained parameters, and buffers of their models, that are not finite at the end.

    The first of them are listed.
    """

    kind = "nonfinite-at-end"
    step: int
    count: Count
    tensors: tuple[BadTensor, ...]

    @property
    def worst(self) -> BadTensor:
        """A parameter before buffers, and one with a NaN before others."""
        return min(self.tensors, key=lambda tensor: (tensor.of != "param", not tensor.nan))


# -- saved tensors -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedEvent(RunEvent):
    """The tensors that autograd keeps for backward in one step.

    Without a total, only those of each module are known.

    Attributes:
        seconds: The time that recording them took.
    """

    kind = "saved"
    step: int
    bytes: Count
    modules: tuple[Sums, ...]
    total: TotalSums | None = left_out(None)
    tree: tuple[Sums, ...] = left_out(())
    lines: tuple[LineSums, ...] = left_out(())
    items: tuple[Mapping[str, Any], ...] = left_out(())
    course: BytesOverStep | None = left_out(None)
    seconds: float | None = left_out(None)

    @classmethod
    def of(
        cls,
        account: SavedAccount,
        *,
        step: int,
        seconds: float | None = None,
    ) -> Self:
        """Return the event that stores a full account."""
        sums = asdict(account.total)
        return cls(
            step=step,
            bytes=account.total.bytes,
            modules=account.modules,
            total=TotalSums(**sums, parameters=account.parameters, inputs=account.inputs),
            tree=account.tree,
            lines=account.lines,
            items=account.items,
            course=account.course,
            seconds=seconds,
        )

    @property
    def account(self) -> SavedAccount | None:
        """The full account; None if there are only the bytes of each module."""
        if self.total is None:
            return None
        return SavedAccount(
            total=self.total,
            parameters=self.total.parameters,
            inputs=self.total.inputs,
            modules=self.modules,
            tree=self.tree,
            lines=self.lines,
            items=self.items,
            course=self.course or BytesOverStep(),
        )
