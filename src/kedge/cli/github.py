"""Findings as annotations of GitHub Actions.

They are lines such as ``::error file=net.py,line=12,title=NAN-BORN::MESSAGE``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kedge.frames import SourceLine
    from kedge.rules.rule import Finding
    from kedge.store.recording import Recording

LEVELS = {"error": "error", "warning": "warning", "info": "notice"}


def annotation(recording: Recording, finding: Finding, workspace: str) -> str:
    """Return the line that makes GitHub show a finding where the program calls its module.

    Args:
        recording: The recording.
        finding: The finding.
        workspace: The folder of the repository; files outside of it are not named.
    """
    properties = {}
    source = _source(recording, finding.site)
    if source:
        file = _inside(source.file, workspace)
        if file:
            properties = {"file": file, "line": str(source.line)}
    properties["title"] = finding.code
    named = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
    message = _escaped(f"{finding.message} {finding.remedy}".rstrip())
    return f"::{LEVELS[finding.severity]} {named}::{message}"


def _source(recording: Recording, text: str) -> SourceLine | None:
    """Return the program's line of a site: its own, or that of its module."""
    found = next((site for site in recording.sites if site.site == text), None)
    if found is None:
        return None
    if found.source:
        return found.source
    for site in recording.sites:
        if site.source and site.owner == found.owner and site.root == found.root:
            return site.source
    return None


def _inside(file: str, workspace: str) -> str | None:
    """Return a file as GitHub names it, from the folder of the repository on; None if it is not in it."""
    relative = os.path.relpath(os.path.realpath(file), os.path.realpath(workspace))
    if relative.startswith(os.pardir):
        return None
    return relative.replace(os.sep, "/")


def _escaped(text: str, more: str = "") -> str:
    for c in f"%\r\n{more}":  # the sign itself first
        text = text.replace(c, f"%{ord(c):02X}")
    return text
