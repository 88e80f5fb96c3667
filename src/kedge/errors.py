"""What can go wrong, as one tree.

Every message says what was asked, what was found and what to do. The ``slug`` names
the paragraph in ``docs/messages.md``::

    KedgeError
    ├── SelectorError           the text of a selector cannot be read
    ├── NoSiteMatched           a selector resolves to nothing
    ├── NoSuchKind              the target does not have this kind of site
    ├── ActionError             an action raised
    │   ├── ActionArity         an action takes the wrong number of arguments
    │   ├── EditError           a returned value cannot take the place of the old one
    │   ├── InPlaceEdit         an action changed its value in place
    │   └── ConditionMet        an ``error_if`` found what it looks for
    ├── ReadError               a record cannot be read
    │   ├── NotRecorded         nothing was recorded there
    │   ├── SeveralRecorded     the name stands for several values
    │   └── Overwritten         the program changed the value after it was recorded
    ├── NeverFired              strict session: a site did not fire
    ├── SessionEnded            a session was used after its end
    ├── CannotCompile           compiled code has no way to do this
    ├── RecordingError          a recording on disk
    │   ├── NotARecording       the folder is not one, or is damaged
    │   ├── NewerFormat         written by a newer Kedge
    │   ├── RecordingExists     refused to overwrite
    │   ├── BeingWritten        refused to replace what another process is writing
    │   ├── NoSuchSite          the recording has no such site
    │   ├── NoSuchRank          the recording has nothing of this rank
    │   └── CannotCompare       two recordings have nothing in common
    ├── WatchingFailed          a strict watch: Kedge itself failed
    ├── NoSuchRule              no rule has this code
    ├── ConfigError             the settings in a file cannot be used
    ├── MissingExtra            a package that this command needs is not installed
    ├── QueryError              a query over a recording cannot be run
    ├── CannotServe             a page cannot be served where it was asked for
    ├── NoSuchCodec             saved tensors cannot be stored this way
    ├── ScriptError             the program to run cannot be started
    ├── OffloadError            saved tensors cannot be offloaded as was asked
    ├── RebuiltWrong            a saved tensor was rebuilt and is not what was saved
    └── StoreError              saved tensors cannot be written to a place, or read back
        ├── DiskFull            there is no room for them
        └── ChecksumMismatch    they came back changed

    KedgeWarning
    ├── NeverFiredWarning       sites that did not fire, with causes
    ├── ActionDisabled          an action failed and was switched off (``on_error="warn"``)
    ├── SavedAside              saved tensors are not looked at in some part of the program
    ├── NothingGained           a device's saved tensors cannot be moved to the CPU's memory with a gain
    ├── NotPinned               the CPU's memory could not be locked for fast copies
    ├── LimitOutOfReach         saved tensors cannot be brought within a limit of memory
    ├── Recompiled              compiled code was thrown away so that hooks take part
    ├── OffloadFailed           saved tensors could not be moved and stayed where they were
    └── DiskIsMemory            the folder for saved tensors is on a file system in memory
"""

from __future__ import annotations


class KedgeError(Exception):
    """The root of every error that Kedge raises on purpose."""

    slug = "error"


class SelectorError(KedgeError, ValueError):
    """The text of a selector cannot be read; the message points at the place."""

    slug = "selector-error"


class NoSiteMatched(KedgeError, LookupError):
    """A selector resolves to no site; the message names the nearest ones."""

    slug = "no-site-matched"


class NoSuchKind(KedgeError, LookupError):
    """The target exists but does not have the kind of site that was asked for."""

    slug = "no-such-kind"


class ActionError(KedgeError):
    """An action raised; the message carries site, pass and shape."""

    slug = "action-error"


class ActionArity(ActionError, TypeError):
    """An action takes neither ``(value)`` nor ``(value, event)``."""

    slug = "action-arity"


class EditError(ActionError, ValueError):
    """A returned value has another shape, dtype or device, or has nowhere to go."""

    slug = "edit-error"


class InPlaceEdit(ActionError):
    """An action changed its value in place instead of returning a new one."""

    slug = "in-place-edit"


class ConditionMet(ActionError):
    """The condition of an ``error_if`` holds at a site."""

    slug = "condition-met"


class ReadError(KedgeError, LookupError):
    """A record cannot be read."""

    slug = "read-error"


class NotRecorded(ReadError):
    """Nothing was recorded under this name; the message says why."""

    slug = "not-recorded"


class SeveralRecorded(ReadError):
    """The name stands for several recorded values; the message lists their names."""

    slug = "several-recorded"


class Overwritten(ReadError):
    """The program changed the tensor after it was recorded."""

    slug = "overwritten"


class NeverFired(KedgeError):
    """A strict session ended and a site had not fired."""

    slug = "never-fired"


class SessionEnded(KedgeError, RuntimeError):
    """A session was used after its end."""

    slug = "session-ended"


class CannotCompile(KedgeError):
    """What was asked for cannot be done inside compiled code."""

    slug = "cannot-compile"


class RecordingError(KedgeError):
    """Something is wrong with a recording on disk."""

    slug = "recording-error"


class NotARecording(RecordingError):
    """The path is not a recording, or one of its files is damaged."""

    slug = "not-a-recording"


class NewerFormat(RecordingError):
    """The recording was written in a format that this version does not know."""

    slug = "newer-format"


class RecordingExists(RecordingError, FileExistsError):
    """A recording of this name exists and may not be replaced without asking."""

    slug = "recording-exists"


class BeingWritten(RecordingError):
    """The recording is being written by a process that lives; the message names it."""

    slug = "being-written"


class NoSuchSite(RecordingError, LookupError):
    """The recording holds no site of this name; the message names the nearest ones."""

    slug = "no-such-site"


class NoSuchRank(RecordingError, LookupError):
    """The recording holds nothing of this rank; the message names those it holds."""

    slug = "no-such-rank"


class CannotCompare(RecordingError, ValueError):
    """Two recordings have no site or no measured step in common; the message says what each has."""

    slug = "cannot-compare"


class WatchingFailed(KedgeError):
    """A strict watch ended, and Kedge itself had failed; the message says in what."""

    slug = "watching-failed"


class NoSuchRule(KedgeError, LookupError):
    """No rule has this code; the message names the nearest ones."""

    slug = "no-such-rule"


class ConfigError(KedgeError, ValueError):
    """The settings in ``pyproject.toml`` cannot be used; the message names file and key."""

    slug = "config-error"


class MissingExtra(KedgeError):
    """A command needs a package that is not installed; the message says what installs it."""

    slug = "missing-extra"


class QueryError(KedgeError, ValueError):
    """A query over a recording cannot be run; the message says why, and what tables there are."""

    slug = "query-error"


class CannotServe(KedgeError, OSError):
    """A page cannot be served on the port that was asked for."""

    slug = "cannot-serve"


class NoSuchCodec(KedgeError, ValueError):
    """There is no codec of this name for saved tensors; the message lists those there are."""

    slug = "no-such-codec"


class ScriptError(KedgeError):
    """The program that was to be run cannot be found or read."""

    slug = "script-error"


class OffloadError(KedgeError, ValueError):
    """What ``kedge.offload`` was asked for cannot be done; the message says what can."""

    slug = "offload-error"


class StoreError(KedgeError, OSError):
    """Saved tensors cannot be written to a place, or not be read back from it."""

    slug = "store-error"


class DiskFull(StoreError):
    """There is no room on the disk for a saved tensor; the message says how much there is."""

    slug = "disk-full"


class ChecksumMismatch(StoreError):
    """A saved tensor came back from the disk with other bytes than were written."""

    slug = "checksum-mismatch"


class RebuiltWrong(KedgeError, RuntimeError):
    """A saved tensor was rebuilt and is not what was saved: the program changed what it is made of behind autograd's back."""

    slug = "rebuilt-wrong"


class KedgeWarning(UserWarning):
    """The root of every warning that Kedge gives."""

    slug = "warning"


class NeverFiredWarning(KedgeWarning):
    """A session ended and some of its sites had not fired."""

    slug = "never-fired-warning"


class ActionDisabled(KedgeWarning):
    """An action raised and was switched off for the rest of its session."""

    slug = "action-disabled"


class Recompiled(KedgeWarning):
    """Compiled code was discarded so that the next call is compiled with the hooks in it."""

    slug = "recompiled"


class SavedAside(KedgeWarning):
    """Saved tensors are not looked at in some part of the program."""

    slug = "saved-aside"


class NothingGained(KedgeWarning):
    """Moving a device's saved tensors to the CPU's memory would free nothing, so they are kept."""

    slug = "nothing-gained"


class NotPinned(KedgeWarning):
    """Pages of the CPU's memory could not be locked, so copies to and from a device stop the program."""

    slug = "not-pinned"


class LimitOutOfReach(KedgeWarning):
    """Saved tensors cannot be brought within the limit of memory; the message says what can be had."""

    slug = "limit-out-of-reach"


class OffloadFailed(KedgeWarning):
    """A saved tensor could not be moved, so it stayed where it was; gradients are right, memory is not saved."""

    slug = "offload-failed"


class DiskIsMemory(KedgeWarning):
    """Saved tensors were sent to a folder whose file system is in memory, which frees none."""

    slug = "disk-is-memory"
