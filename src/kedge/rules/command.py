"""Commands that would show more of a run: the command in its manifest, with options that it did not have."""

from __future__ import annotations

from pathlib import PurePath

from kedge.shown_text import typed
from kedge.store.events import CompiledEvent, DumpEvent
from kedge.store.recording import Recording

#: The script in the manifest of a program that was not started as one.
_UNNAMED = ("python", "-c", "-m")
_NOTEBOOKS = ("ipykernel_launcher.py", "colab_kernel_launcher.py")

#: The placeholder for a program that the manifest does not name.
_ANY = "SCRIPT"

#: What has a program run uncompiled, from outside and from inside.
_UNCOMPILED = "TORCH_COMPILE_DISABLE=1 "
_EAGER = 'torch.compiler.set_stance("force_eager")'


def closer_look(recording: Recording) -> str:
    """Return the whole command that measures every step; empty if the run had these options."""
    if measures_all(recording):
        return ""
    return _command(recording, dump=False)


def with_dump_on(recording: Recording) -> str:
    """Return the whole command that keeps the first bad call; empty if the run had this option."""
    if dumps(recording):
        return ""
    return _command(recording, dump=True)


def measures_all(recording: Recording) -> bool:
    """Whether the options of the run ask for every step to be measured."""
    manifest = recording.manifest
    is_unlimited = "budget" in manifest and manifest["budget"] is None
    return manifest.get("every") == 1 and is_unlimited


def dumps(recording: Recording) -> bool:
    """Whether the first bad call was kept, or would have been; calls in compiled code cannot be kept."""
    return bool(recording.of(DumpEvent)) or (
        bool(recording.manifest.get("dump")) and not is_compiled(recording)
    )


def is_compiled(recording: Recording) -> bool:
    """Whether the run had compiled code."""
    return bool(recording.of(CompiledEvent))


def again(recording: Recording, purpose: str, since: str = "") -> str:
    """Return a sentence with a command that shows more, and a space; empty if the run had every option.

    Args:
        recording: The recording.
        purpose: The beginning of the sentence: ``To have the module named``.
        since: The point to start from, if not the beginning, with a space after it.
    """
    has_outputs = any(site.kind == "out" for site in recording.sites)
    seen = not is_compiled(recording) or has_outputs
    command = ""
    if seen:
        command = closer_look(recording)
    command = command or with_dump_on(recording)
    if not command:
        return ""
    return f'{purpose}, run it again {since}with "{command}". '


def uncompiled(recording: Recording) -> str:
    """Return a space and a sentence with the command that names an operation of compiled code; empty if there was none."""
    command = ""
    if is_compiled(recording):
        command = with_dump_on(recording)
    if not command:
        return ""
    return f' To have the operation named, run "{command}".'


def _command(recording: Recording, *, dump: bool) -> str:
    manifest = recording.manifest
    script = str(manifest.get("script") or "")
    command = manifest.get("command") or ()
    if script in _UNNAMED or PurePath(script).name in _NOTEBOOKS:
        if not dump:
            return "kedge.watch(every=1, budget=None)"
        if is_compiled(recording):
            return f"kedge.watch(dump=True) after {_EAGER}"
        return "kedge.watch(dump=True)"

    sites = str(manifest.get("sites") or "**")
    options = []
    if measures_all(recording) or not dump:
        options += ["--budget", "none", "--every", "1"]
    if dump:
        options += ["--dump"]
    if sites != "**":
        options += ["--sites", sites]
    variable = ""
    if dump and is_compiled(recording):
        variable = _UNCOMPILED
    return variable + typed(
        *_launcher(manifest.get("world")), "run", *options, *(command or [script or _ANY])
    )


def _launcher(world: object) -> list[str]:
    if not isinstance(world, int) or world < 2:
        return ["kedge"]
    return ["torchrun", "--nproc-per-node", str(world), "-m", "kedge"]
