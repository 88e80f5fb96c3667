"""The head of a page: what ran, on what, how it ended, and what the watching cost."""

from __future__ import annotations

import shlex
from typing import Any

from kedge.report.page.modules import saved_event
from kedge.store.recording import Recording

KEYS = ("device", "torch", "python", "kedge", "started", "every", "world", "budget")


def about(recording: Recording) -> dict[str, Any]:
    """Describe the run for the page."""
    manifest, end = recording.manifest, recording.end
    told: dict[str, Any] = {key: manifest.get(key) for key in KEYS}
    told |= {
        "name": recording.path.name,
        "command": _command(recording),
        "watched": manifest.get("sites"),
    }
    told |= {"sampled": len(recording.steps), "truncated": recording.truncated, "running": end is None}
    told |= {"last": int(recording.steps[-1]) if len(recording.steps) else None}
    if end is not None:
        told |= {key: end.get(key) for key in ("exit", "error", "steps", "seconds", "watching", "slowdown", "levels")}
    saved = saved_event(recording)
    told["saved"] = {"step": saved.get("step"), "bytes": saved.get("bytes")} if saved else None
    told["ranks"] = len(recording.ranks)
    return told


def _command(recording: Recording) -> str:
    command = recording.manifest.get("command")
    return shlex.join(map(str, command)) if command else str(recording.manifest.get("script") or "")
