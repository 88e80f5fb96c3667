"""The commands that would show more of a run, made of what its manifest says of the one that ran; never of what was in use."""

from __future__ import annotations

import shlex
from pathlib import PurePath

from kedge.store.recording import Recording

#: What the manifest calls the script of a program that was not started as one.
_UNNAMED = ("python", "-c", "-m")
_NOTEBOOKS = ("ipykernel_launcher.py", "colab_kernel_launcher.py")

#: What stands for the program where the manifest does not name it.
_ANY = "SCRIPT"


def closer_look(recording: Recording) -> str:
    """Return the whole command that measures every step; empty if every step was to be measured already."""
    return "" if measures_all(recording) else _command(recording, dump=False)


def with_dump_on(recording: Recording) -> str:
    """Return the whole command that keeps the first call that goes wrong; empty if calls were kept already."""
    return "" if dumps(recording) else _command(recording, dump=True)


def measures_all(recording: Recording) -> bool:
    """Whether every step was to be measured."""
    manifest = recording.manifest
    return manifest.get("every") == 1 and "budget" in manifest and manifest["budget"] is None


def dumps(recording: Recording) -> bool:
    """Whether the first call that goes wrong was to be kept."""
    return bool(recording.manifest.get("dump")) or any(event.get("kind") == "dump" for event in recording.events)


def again(recording: Recording, purpose: str, since: str = "") -> str:
    """Return a sentence that says how to see more, with a space after it; empty if every option was in use.

    Args:
        recording: The recording.
        purpose: What it is for: ``To have the module named``.
        since: Where to start from, if not from the beginning, with a space after it.
    """
    command = closer_look(recording) or with_dump_on(recording)
    return f"{purpose}, run it again {since}as `{command}`. " if command else ""


def _command(recording: Recording, *, dump: bool) -> str:
    manifest = recording.manifest
    script, command = str(manifest.get("script") or ""), [str(word) for word in manifest.get("command") or ()]
    if script in _UNNAMED or PurePath(script).name in _NOTEBOOKS:
        return "kedge.watch(dump=True)" if dump else "kedge.watch(every=1, budget=None)"
    sites = str(manifest.get("sites") or "**")
    options = ["--budget", "none", "--every", "1"] if measures_all(recording) or not dump else []
    options += (["--dump"] if dump else []) + (["--sites", sites] if sites != "**" else [])
    return shlex.join([*_launcher(manifest.get("world")), "run", *options, *(command or [script or _ANY])])


def _launcher(world: object) -> list[str]:
    if not isinstance(world, int) or world < 2:
        return ["kedge"]
    return ["torchrun", "--nproc-per-node", str(world), "-m", "kedge"]
