"""All errors and warnings, as one tree.

Every message names the request, the cause and the remedy. The ``slug``, the name in small
letters, is the heading of the paragraph in ``docs/messages.md``::

    KedgeError
    ├── SelectorError           the text of a selector cannot be read
    ├── NoSiteMatched           a selector resolves to nothing
    ├── NoSuchKind              the target does not have this kind of site
    ├── ActionError             an action raised
    │   ├── ActionArity         an action takes the wrong number of arguments
    │   ├── EditError           a returned value cannot take the place of the old one
    │   ├── InPlaceEdit         an action changed its value in place
    │   ├── ConditionMet        an ``error_if`` found what it looks for
    │   └── InterventionError   activations cannot be patched, ablated or steered as was asked
    ├── ReadError               a record cannot be read
    │   ├── NotRecorded         nothing was recorded there
    │   ├── SeveralRecorded     the name stands for several values
    │   └── Overwritten         the program changed the value after it was recorded
    ├── NeverFired              strict session: a site did not fire
    ├── SessionEnded            a session was used after its end
    ├── StopForward             an action ends the forward, which is not needed any further
    ├── CannotCompile           compiled code has no way to do this
    ├── RecordingError          a recording on disk
    │   ├── NotARecording       the folder is not one, or is damaged
    │   ├── NewerFormat         written by a newer Kedge
    │   ├── RecordingExists     refused to overwrite
    │   ├── BeingWritten        refused to replace what another process is writing
    │   ├── NoSuchSite          the recording has no such site
    │   ├── NoSuchRank          the recording has nothing of this rank
    │   ├── NotFeatures         the folder holds no features of a data set, or is damaged
    │   ├── OtherRun            the folder holds the features of another run
    │   ├── NoSuchKey           there are no features of a sample of this key
    │   └── CannotCompare       two recordings have nothing in common
    ├── WatchingFailed          a strict watch: Kedge itself failed
    ├── NoSuchRule              no rule has this code
    ├── ConfigError             the settings in a file cannot be used
    ├── ExtractError            features cannot be taken as was asked
    ├── ReducerError            values cannot be reduced as was asked
    │   └── SettingsDiffer      two reducers of different settings cannot be merged
    ├── TableError              features do not make a table of one row a sample
    ├── ExtractionFailed        the features of a data set could not be taken to the end
    │   └── BadSample           a sample cannot be loaded, or the model cannot take it
    ├── AttributionError        the output to explain, or the site, does not fit the model
    │   └── NothingCut          no ReLU's gradient was cut, or some ReLUs cannot be seen
    ├── MissingExtra            a package that only this feature needs is not installed
    ├── QueryError              a query over a recording cannot be run
    ├── CannotServe             a page cannot be served where it was asked for
    ├── CannotDraw              the argument cannot be drawn
    ├── NoSuchCodec             saved tensors cannot be stored this way
    ├── ScriptError             the program to run cannot be started
    ├── OffloadError            saved tensors cannot be offloaded as was asked
    ├── RebuiltWrong            a rebuilt tensor differs from the saved one
    └── StoreError              saved tensors cannot be written to a place, or read back
        ├── DiskFull            there is no room for them
        └── ChecksumMismatch    they came back changed

    KedgeWarning
    ├── NeverFiredWarning       sites that did not fire, with causes
    ├── ActionDisabled          an action failed and was switched off (``on_error="warn"``)
    ├── SavedAside              saved tensors are ignored in some part of the program
    ├── NothingGained           a device's saved tensors cannot be moved to the CPU's memory with a gain
    ├── NotPinned               the CPU's memory could not be locked for fast copies
    ├── LimitOutOfReach         saved tensors cannot be brought within a limit of memory
    ├── Recompiled              compiled code was thrown away so that hooks take part
    ├── OffloadFailed           saved tensors could not be moved and stayed where they were
    └── DiskIsMemory            the folder for saved tensors is on a file system in memory
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

_OURS = f"{Path(__file__).parent}{os.sep}"


class _Named:
    """A class with a slug: ``no-site-matched`` for `NoSiteMatched`."""

    slug: str

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.slug = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


class KedgeError(_Named, Exception):
    """The root of every error that Kedge raises on purpose."""


class SelectorError(KedgeError, ValueError):
    """The text of a selector cannot be read; the message points at the place."""


class NoSiteMatched(KedgeError, LookupError):
    """A selector resolves to no site; the message names the nearest ones."""


class NoSuchKind(KedgeError, LookupError):
    """The target exists but does not have the kind of site that was asked for."""


class ActionError(KedgeError):
    """An action raised; the message carries site, pass and shape."""


class ActionArity(ActionError, TypeError):
    """An action takes neither ``(value)`` nor ``(value, event)``."""


class EditError(ActionError, ValueError):
    """A returned value has another shape, dtype or device, or has nowhere to go."""


class InPlaceEdit(ActionError):
    """An action changed its value in place instead of returning a new one."""


class ConditionMet(ActionError):
    """The condition of an ``error_if`` holds at a site."""


class ReadError(KedgeError, LookupError):
    """A record cannot be read."""


class NotRecorded(ReadError):
    """Nothing was recorded under this name; the message says why."""


class SeveralRecorded(ReadError):
    """The name stands for several recorded values; the message lists their names."""


class Overwritten(ReadError):
    """The program changed the tensor after it was recorded."""


class NeverFired(KedgeError):
    """A strict session ended and a site had not fired."""


class SessionEnded(KedgeError, RuntimeError):
    """A session was used after its end."""


class StopForward(KedgeError):
    """Raised by an action to end the forward that calls it; passes through unchanged, for the caller to catch."""


class CannotCompile(KedgeError):
    """The request cannot be carried out inside compiled code."""


class RecordingError(KedgeError):
    """Something is wrong with a recording on disk."""


class NotARecording(RecordingError):
    """The path is not a recording, or one of its files is damaged."""


class NewerFormat(RecordingError):
    """The recording was written in a format that this version does not know."""


class RecordingExists(RecordingError, FileExistsError):
    """A recording of this name exists and may not be replaced without asking."""


class BeingWritten(RecordingError):
    """A running process is writing the recording; the message names it."""


class NoSuchSite(RecordingError, LookupError):
    """The recording has no site of this name; the message names the nearest ones."""


class NoSuchRank(RecordingError, LookupError):
    """The recording has nothing of this rank; the message names the ranks that it has."""


class NotFeatures(RecordingError):
    """The path holds no features of a data set, or one of its files is damaged or missing."""


class OtherRun(RecordingError, FileExistsError):
    """The folder holds the features of another run; the message names the differences."""


class NoSuchKey(RecordingError, LookupError):
    """There are no features of a sample of this key; the message says whether it was left out."""


class CannotCompare(RecordingError, ValueError):
    """Two recordings have no site or no measured step in common; the message says what each has."""


class WatchingFailed(KedgeError):
    """A strict watch ended, and Kedge itself had failed; the message says where."""


class NoSuchRule(KedgeError, LookupError):
    """No rule has this code; the message names the nearest ones."""


class ConfigError(KedgeError, ValueError):
    """The settings in ``pyproject.toml`` cannot be used; the message names file and key."""


class ExtractError(KedgeError, ValueError):
    """``kedge.extract`` cannot do what was asked; the message says what it can."""


class ReducerError(KedgeError, ValueError):
    """Values cannot be reduced as was asked; the message says what they are and what is possible."""


class SettingsDiffer(ReducerError):
    """Two reducers, or a reducer and a state, have different settings; the message names them."""


class TableError(KedgeError, ValueError):
    """Features do not make a table with one row for each sample; the message says which, and why."""


class ExtractionFailed(KedgeError):
    """The features of a data set could not be taken to the end; what was written before is kept."""


class BadSample(ExtractionFailed):
    """A sample cannot be loaded, or the model cannot take it; the message names its key."""


class AttributionError(KedgeError, ValueError):
    """The output to explain, or the site, does not fit the model; the message says what the model has."""


class NothingCut(AttributionError):
    """No ReLU's gradient could be cut, or autograd cannot see them; the message says which were searched for."""


class InterventionError(ActionError, ValueError):
    """Activations cannot be changed as was asked; the message says what there is."""


class MissingExtra(KedgeError):
    """A package that only this feature needs is not installed; the message says what installs it."""


class QueryError(KedgeError, ValueError):
    """A query over a recording cannot be run; the message says why, and what tables there are."""


class CannotServe(KedgeError, OSError):
    """A page cannot be served on the port that was asked for."""


class CannotDraw(KedgeError, ValueError):
    """The argument cannot be drawn; the message says what can."""


class NoSuchCodec(KedgeError, ValueError):
    """There is no codec of this name for saved tensors; the message lists the codecs."""


class ScriptError(KedgeError):
    """The program that was to be run cannot be found or read."""


class OffloadError(KedgeError, ValueError):
    """``kedge.offload`` cannot do what was asked; the message says what it can."""


class StoreError(KedgeError, OSError):
    """Saved tensors cannot be written to a place, or cannot be read back."""


class DiskFull(StoreError):
    """There is no room on the disk for a saved tensor; the message says how much there is."""


class ChecksumMismatch(StoreError):
    """A saved tensor came back from the disk with other bytes than were written."""


class RebuiltWrong(KedgeError, RuntimeError):
    """A rebuilt tensor differs from the saved one: the program changed a source of it unseen by autograd."""


class KedgeWarning(_Named, UserWarning):
    """The root of every warning that Kedge gives."""


class NeverFiredWarning(KedgeWarning):
    """A session ended and some of its sites had not fired."""


class ActionDisabled(KedgeWarning):
    """An action raised and was switched off for the rest of its session."""


class Recompiled(KedgeWarning):
    """Compiled code was discarded so that the next call is compiled with the hooks in it."""


class SavedAside(KedgeWarning):
    """Saved tensors are ignored in some part of the program."""


class NothingGained(KedgeWarning):
    """Moving a device's saved tensors to the CPU's memory would free nothing, so they are kept."""


class NotPinned(KedgeWarning):
    """Pages of the CPU's memory could not be locked, so copies to and from a device stop the program."""


class LimitOutOfReach(KedgeWarning):
    """Saved tensors cannot be brought within the limit of memory; the message says what is possible."""


class OffloadFailed(KedgeWarning):
    """A saved tensor could not be moved, so it stayed where it was; gradients are right, memory is not saved."""


class DiskIsMemory(KedgeWarning):
    """Saved tensors were sent to a folder whose file system is in memory, which frees none."""


def warn(warning: Warning) -> None:
    """Warn at the innermost line outside of Kedge."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(warning, stacklevel=level)
