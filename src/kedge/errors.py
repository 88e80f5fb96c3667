"""All errors and warnings, as one tree.

Every message names the request, the cause and the remedy. The ``slug``, the name in small
letters, is the heading of the paragraph in ``docs/reference/messages.md``::

    KedgeError
    ├── WrongCall               a function was called with arguments that it cannot use
    ├── SelectorError           the text of a selector cannot be read
    ├── NoSiteMatched           a selector resolves to nothing
    ├── NoSuchKind              the target does not have this kind of site
    ├── ActionError             an action raised an error
    │   ├── ActionArity         an action takes the wrong number of arguments
    │   ├── EditError           a returned value cannot replace the old one
    │   ├── InPlaceEdit         an action changed its value in place
    │   ├── ConditionMet        the condition of an error_if holds
    │   └── InterventionError   activations cannot be edited in the requested way
    ├── ReadError               a record cannot be read
    │   ├── NotRecorded         nothing was recorded there
    │   ├── SeveralRecorded     the name matches several recorded values
    │   └── Overwritten         the program changed the value after it was recorded
    ├── EventError              the call of an event cannot be read there
    ├── NeverFired              a strict session ended and a site had not fired
    ├── SessionEnded            a session was used after its end
    ├── StopForward             an action ends the forward early
    ├── CannotCompile           the request is impossible inside compiled code
    ├── RecordingError          a recording on disk cannot be read or written
    │   ├── NotARecording       the folder is not a recording, or is damaged
    │   ├── NewerFormat         a newer Kedge wrote it
    │   ├── RecordingExists     the recording exists and may not be replaced
    │   ├── BeingWritten        a running process is writing the recording
    │   ├── NoSuchSite          the recording has no such site
    │   ├── NoSuchRank          the recording has nothing of this rank
    │   ├── NotFeatures         the folder holds no features of a data set, or is damaged
    │   ├── OtherRun            the folder holds the features of another run
    │   ├── NoSuchKey           there are no features of a sample with this key
    │   └── CannotCompare       two recordings have nothing in common
    ├── WatchingFailed          Kedge itself failed in a strict watch
    ├── FindingRaised           a watch found what it was asked to raise
    ├── NoSuchRule              no rule has this code
    ├── ConfigError             the settings in a file cannot be used
    ├── ExtractError            features cannot be extracted in the requested way
    ├── ReducerError            values cannot be reduced in the requested way
    │   └── SettingsDiffer      two reducers with different settings cannot be merged
    ├── TableError              features do not make a table with one row for each sample
    ├── ExtractionFailed        the extraction over a data set stopped early
    │   └── BadSample           a sample cannot be loaded, or the model cannot take it
    ├── AttributionError        the output to explain, or the site, does not fit the model
    │   └── NothingCut          no ReLU's gradient was cut, or some ReLUs cannot be seen
    ├── MissingExtra            a package that only this feature needs is not installed
    ├── QueryError              a query over a recording cannot be run
    ├── CannotServe             a page cannot be served on the requested port
    ├── CannotAttach            a running process cannot be watched
    ├── CannotDraw              the argument cannot be drawn
    ├── NoSuchCodec             saved tensors cannot be stored this way
    ├── ScriptError             the program to run cannot be started
    ├── OffloadError            saved tensors cannot be offloaded in the requested way
    ├── RebuiltWrong            a rebuilt tensor differs from the saved one
    ├── RecomputedWrong         a module cannot be run again in backward as it ran in the forward
    └── StoreError              saved tensors cannot be written to a store, or read back
        ├── DiskFull            the disk has no room for them
        └── ChecksumMismatch    they were read back changed

    KedgeWarning
    ├── NeverFiredWarning       sites that did not fire, with causes
    ├── ActionDisabled          an action failed and was switched off (on_error="warn")
    ├── SavedAside              saved tensors are ignored in some part of the program
    ├── NothingGained           moving a device's saved tensors to the CPU would free nothing
    ├── NotPinned               the CPU's memory could not be locked for fast copies
    ├── LimitOutOfReach         saved tensors cannot be brought within a memory limit
    ├── AttachedTwice           a hook was attached again, and the first one is still in place
    ├── InTrainingMode          a model runs in training mode where its features are read
    ├── PartialGradient         a gradient arrived in parts that could not be added up
    ├── EditNotRepeated         an edit ended before the backward of a checkpoint that has it
    ├── Recompiled              compiled code is compiled again, with the hooks in it
    ├── OffloadFailed           a saved tensor could not be moved and stayed in place
    └── DiskIsMemory            the folder for saved tensors is on a file system in memory

    TrainingStopped             a watch found what it was asked to stop at; it is a SystemExit
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from kedge.frames import is_between, level_of_program


class _Named:
    """Base class that derives the slug: ``no-site-matched`` for `NoSiteMatched`."""

    slug: str

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.slug = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


class KedgeError(_Named, Exception):
    """The root of every error that Kedge raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Called by IPython: the traceback with the user's own lines; after ``%xmode Verbose`` with all lines."""
        shell = sys.modules["IPython"].get_ipython()
        whole = shell.InteractiveTB.mode == "Verbose"
        with ExitStack() as stack:
            for error in () if whole else _chain(self):
                stack.callback(error.with_traceback, error.__traceback__)
                error.with_traceback(_own_lines(error.__traceback__))
            offset = 1 if whole else 0
            lines = shell.InteractiveTB.structured_traceback(
                type(self), self, self.__traceback__, tb_offset=offset
            )
        return list(lines)


class WrongCall(KedgeError, TypeError, ValueError):
    """A function was called with arguments that it cannot use; the message shows a right call."""


class SelectorError(KedgeError, ValueError):
    """The text of a selector cannot be read; the message points at the place."""


class NoSiteMatched(KedgeError, LookupError):
    """A selector resolves to no site; the message names the nearest ones."""


class NoSuchKind(KedgeError, LookupError):
    """The target exists but does not have the requested kind of site."""


class ActionError(KedgeError):
    """An action raised; the message names site, pass and shape."""


class ActionArity(ActionError, TypeError):
    """An action takes neither ``(value)`` nor ``(value, event)``."""


class EditError(ActionError, ValueError):
    """A returned value has another shape, dtype or device, or nothing at the site can take it."""


class InPlaceEdit(ActionError):
    """An action changed its value in place instead of returning a new one."""


class ConditionMet(ActionError):
    """The condition of an ``error_if`` holds at a site."""


class ReadError(KedgeError, LookupError):
    """A record cannot be read."""


class NotRecorded(ReadError, KeyError):
    """Nothing was recorded under this name; the message names the cause."""

    __str__ = Exception.__str__  # that of KeyError shows the message in quotes, on one line


class SeveralRecorded(ReadError):
    """The name matches several recorded values; the message lists their names."""


class Overwritten(ReadError):
    """The program changed the tensor after it was recorded."""


class EventError(KedgeError, LookupError):
    """An event was asked for a module, inputs or an output that it does not have there, or no longer has."""


class NeverFired(KedgeError):
    """A strict session ended and a site had not fired."""


class SessionEnded(KedgeError, RuntimeError):
    """A session was used after its end."""


class StopForward(KedgeError):
    """Raised by an action to end the forward that calls it; passes through unchanged, for the caller to catch."""


class CannotCompile(KedgeError):
    """The request cannot be carried out inside compiled code."""


class RecordingError(KedgeError):
    """A recording on disk cannot be read or written."""


class NotARecording(RecordingError):
    """The path is not a recording, or one of its files is damaged."""


class NewerFormat(RecordingError):
    """The recording has a format that this version does not know."""


class RecordingExists(RecordingError, FileExistsError):
    """A recording of this name exists, and replacing it was not allowed."""


class BeingWritten(RecordingError):
    """A running process is writing the recording; the message names the process."""


class NoSuchSite(RecordingError, LookupError):
    """The recording has no site of this name; the message names the nearest ones."""


class NoSuchRank(RecordingError, LookupError):
    """The recording has nothing of this rank; the message names the recording's ranks."""


class NotFeatures(RecordingError):
    """The path holds no features of a data set, or one of its files is damaged or missing."""


class OtherRun(RecordingError, FileExistsError):
    """The folder holds the features of another run; the message names the differences."""


class NoSuchKey(RecordingError, LookupError):
    """There are no features of a sample of this key; the message tells whether it was skipped."""


class CannotCompare(RecordingError, ValueError):
    """Two recordings have no site or no measured step in common; the message lists those of each."""


class WatchingFailed(KedgeError):
    """A strict watch ended, and Kedge itself had failed; the message names the place."""


class FindingRaised(KedgeError):
    """A watch found what it was asked to raise: ``on={"NAN-BORN": "raise"}``.

    Attributes:
        finding: What was found, a `kedge.Finding`.
    """

    def __init__(self, message: str, finding: Any = None) -> None:
        super().__init__(message)
        self.finding = finding


STOPPED = 3
"""The exit status of a program that was stopped at a finding."""


class TrainingStopped(_Named, SystemExit):
    """A watch found what it was asked to stop at: ``on={"NAN-BORN": "stop"}``.

    It ends the program with the exit status 3. As an exit, it passes by ``except Exception``, and
    ``finally`` blocks are run.

    Attributes:
        finding: What was found, a `kedge.Finding`.
    """

    def __init__(self, finding: Any = None) -> None:
        super().__init__(STOPPED)
        self.finding = finding


class NoSuchRule(KedgeError, LookupError):
    """No rule has this code; the message names the nearest ones."""


class ConfigError(KedgeError, ValueError):
    """The settings in ``pyproject.toml`` cannot be used; the message names file and key."""


class ExtractError(KedgeError, ValueError):
    """``kedge.extract`` cannot carry out the request; the message lists the possibilities."""


class ReducerError(KedgeError, ValueError):
    """Values cannot be reduced in the requested way; the message names their properties and the possibilities."""


class SettingsDiffer(ReducerError):
    """Two reducers, or a reducer and a state, have different settings; the message names them."""


class TableError(KedgeError, ValueError):
    """Features do not make a table with one row for each sample; the message names the feature and the cause."""


class ExtractionFailed(KedgeError):
    """The extraction over a data set stopped early; the features written before are kept."""


class BadSample(ExtractionFailed):
    """A sample cannot be loaded, or the model cannot take it; the message names its key."""


class AttributionError(KedgeError, ValueError):
    """The output to explain, the site or the method does not fit the model; the message describes the model's."""


class NothingCut(AttributionError):
    """No ReLU's gradient could be cut, or autograd cannot see the ReLUs; the message lists the types searched for."""


class InterventionError(ActionError, ValueError):
    """Activations cannot be changed, written or read in the requested way; the message lists the possibilities."""


class MissingExtra(KedgeError):
    """A package that only this feature needs is not installed; the message gives the install command."""


class QueryError(KedgeError, ValueError):
    """A query over a recording cannot be run; the message names the cause and the tables."""


class CannotAttach(KedgeError):
    """A running process cannot be watched from now on; the message gives the reason and the remedy."""


class CannotServe(KedgeError, OSError):
    """A page cannot be served on the requested port."""


class CannotDraw(KedgeError, ValueError):
    """The argument cannot be drawn; the message lists the types that can."""


class NoSuchCodec(KedgeError, ValueError):
    """There is no codec of this name for saved tensors; the message lists the codecs."""


class ScriptError(KedgeError):
    """The program to run cannot be found or read."""


class OffloadError(KedgeError, ValueError):
    """``kedge.offload`` cannot carry out the request; the message lists the possibilities."""


class StoreError(KedgeError, OSError):
    """Saved tensors cannot be written to a store, or read back."""


class DiskFull(StoreError):
    """The disk has no room for a saved tensor; the message gives the free space."""


class ChecksumMismatch(StoreError):
    """A saved tensor was read back from the disk with other bytes than were written."""


class RebuiltWrong(KedgeError, RuntimeError):
    """A rebuilt tensor differs from the saved one: the program changed one of its sources without autograd noticing."""


class RecomputedWrong(KedgeError, RuntimeError):
    """A module named by ``recompute`` was run again in backward, or was about to be, and is not what it was in the forward."""


class KedgeWarning(_Named, UserWarning):
    """The root of every warning that Kedge issues."""


class NeverFiredWarning(KedgeWarning):
    """A session ended and some of its sites had not fired."""


class ActionDisabled(KedgeWarning):
    """An action raised and was switched off for the rest of its session."""


class AttachedTwice(KedgeWarning):
    """A hook was attached again without a block, and the first one is still in place, so both run."""


class InTrainingMode(KedgeWarning):
    """A model is run in training mode, with dropout or the statistics of the batch, by an attribution or an extraction."""


class PartialGradient(KedgeWarning):
    """A gradient arrived in parts that could not be added up."""


class EditNotRepeated(KedgeWarning):
    """An edit was removed between the forward and the backward of a checkpoint, whose recompute will lack it."""


class Recompiled(KedgeWarning):
    """Compiled code was discarded so that the next call compiles the hooks in."""


class SavedAside(KedgeWarning):
    """Saved tensors are ignored in some part of the program."""


class NothingGained(KedgeWarning):
    """Moving a device's saved tensors to the CPU's memory would free nothing, so they are kept."""


class NotPinned(KedgeWarning):
    """Pages of the CPU's memory could not be locked, so copies to and from a device stop the program."""


class LimitOutOfReach(KedgeWarning):
    """Saved tensors cannot be brought within the limit; the message gives the size, or the slowdown, that is possible."""


class OffloadFailed(KedgeWarning):
    """A saved tensor could not be moved and stayed in place; gradients are right, memory is not saved."""


class DiskIsMemory(KedgeWarning):
    """The folder for saved tensors is on a file system in memory, so no memory is freed."""


def warn(warning: Warning) -> None:
    """Issue a warning at the program's running line."""
    warnings.warn(warning, stacklevel=level_of_program())


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that a traceback shows before it."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _own_lines(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback with the user's own frames; all of it if it has none."""
    kept = []
    here = frames
    while here is not None:
        module = str(here.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] != "IPython" and not is_between(
            here.tb_frame.f_code.co_filename
        ):
            kept.append(here)
        here = here.tb_next
    shown: TracebackType | None = None
    for each in reversed(kept):
        shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown or frames


@contextmanager
def required(package: str, extra: str, what: str) -> Iterator[None]:
    """Turn a missing package into an error that says what to install.

    Args:
        package: The package that the block imports.
        extra: The extra of Kedge that brings it.
        what: The subject and the verb of the message, such as ``kedge query needs``.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtra(
            f"{what} the package {package}, which is not installed: pip install 'kedge[{extra}]'"
        ) from error
