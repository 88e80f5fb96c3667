"""The memory of a step as a picture of its own.

It is a file for the browser, a frame in a notebook, and a text in a terminal.
"""

from __future__ import annotations

import os
from html import escape

from kedge.files.atomic_write import replace
from kedge.files.given_path import given_path
from kedge.report.held import HeldNode, held_tree, icicle_text, memory_content
from kedge.report.page.document import Document
from kedge.report.page.render import assembled, asset, bundled
from kedge.short_text import sized
from kedge.store.saved_account import BytesOverStep

_SCRIPTS = (
    "elements.js",
    "theme.js",
    "numbers.js",
    "filters.js",
    "held.js",
    "timeline.js",
    "flame.js",
    "memory.js",
)
#: The heights of the frame in a notebook: what is above the flame graph, and one row of it.
_ABOVE = 372
_ROW = 21
_FRAME = 'title="memory held for backward" sandbox="allow-scripts"'
# An editor's theme need not be the system's, and a frame does not inherit it: it is told the colour
# of the text around it.
_TELL_COLOUR = "this.contentWindow.postMessage({kedgeTextColour:getComputedStyle(this).color},'*')"


class StepMemory:
    """The memory that autograd held over a step: a timeline, and a flame graph of a moment of it.

    In a notebook it is shown as it is; ``print`` draws the flame graph of the peak as text.

    Args:
        course: The bytes over the step, with the tensors held.
        resident: The bytes of saved parameters and buffers.
    """

    def __init__(self, course: BytesOverStep, resident: int = 0) -> None:
        self._course = course
        self._resident = resident

    def html(self) -> str:
        """Return the page: one file that needs no network."""
        described = {
            "run": {"name": f"Memory held for backward: {sized(self._course.peak)} at the peak"},
            "memory": memory_content(self._course, self._resident),
        }
        code = bundled(_SCRIPTS, asset("memory_page.js", __package__))
        return assembled(asset("memory.html", __package__), code, Document(described, {}))

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the page to a file.

        Raises:
            RecordingError: The file cannot be written.
        """
        replace(given_path(file), self.html())

    def __str__(self) -> str:
        """The flame graph of the peak as text."""
        course = self._course
        if not course.at:
            return "autograd saved nothing"
        held = f"{sized(course.peak)} held at the peak"
        where = f"after save or release {course.peak_at:,} of {course.at[-1]:,}"
        return f"{held}, {where}\n{icicle_text(self._at_peak())}"

    def _repr_html_(self) -> str:
        """The page in a frame, whose script and styles do not reach the notebook."""
        depth = 0
        if self._course.at:
            depth = max(depth for _, depth, _ in self._at_peak().walk())
        style = f"width:100%;height:{_ABOVE + depth * _ROW}px;border:0"
        begin = f'<iframe {_FRAME} style="{style}"'
        return f'{begin} srcdoc="{escape(self.html())}" onload="{_TELL_COLOUR}"></iframe>'

    def _at_peak(self) -> HeldNode:
        return held_tree(self._course.tensors, self._course.peak_moment)
