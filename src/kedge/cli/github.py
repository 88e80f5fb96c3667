"""Findings as annotations of GitHub Actions: lines such as ``::error file=net.py,line=12,title=NAN-BORN::MESSAGE``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kedge.frames import SourceLine
    from kedge.rules.rule import Finding
    from kedge.store.recording import Recording

LEVELS = {"error": "error", "warning": "warning", "info": "notice"}


def annotation(recording: Recording, finding: Finding, workspace: str) -> str:
    """Return the line that makes GitHub show a finding at the line of the program that calls its module.

    Args:
        recording: The recording.
        finding: The finding.
        workspace: The folder of the repository; files outside of it are not named.
    """
    source = _source(recording, finding.site)
    properties = {"title": finding.code}
    if source and (file := _inside(source.file, workspace)):
        properties = {"file": file, "line": str(source.line), **properties}
    named = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
    return f"::{LEVELS[finding.severity]} {named}::{_escaped(f'{finding.message} {finding.remedy}'.rstrip())}"


def _source(recording: Recording, text: str) -> SourceLine | None:
    """Return the program's line of a site: its own, or that of its module."""
    found = next((site for site in recording.sites if site.site == text), None)
    if found is None:
        return None
    own = (
        site.source
        for site in recording.sites
        if site.owner == found.owner and site.root == found.root
    )
    return found.source or next(filter(None, own), None)


def _inside(file: str, workspace: str) -> str | None:
    """Return a file as GitHub names it, from the folder of the repository on; None if it is not in it."""
    relative = os.path.relpath(os.path.realpath(file), os.path.realpath(workspace))
    return None if relative.startswith(os.pardir) else relative.replace(os.sep, "/")


def _escaped(text: str, more: str = "") -> str:
    return "".join(f"%{ord(c):02X}" if c in f"%\r\n{more}" else c for c in text)
