"""What the page's script draws of the memory of a step, as plain JSON values."""

from __future__ import annotations

from typing import Any

from kedge.report.held.folded_paths import folded_paths
from kedge.store.saved_account import BytesOverStep


def memory_content(course: BytesOverStep, resident: int) -> dict[str, Any]:
    """Return the bytes over a step with the tensors held, and the names under which alike blocks fold.

    Args:
        course: The bytes over the step.
        resident: The bytes of saved parameters and buffers.
    """
    content = course.entry() | {"resident": resident}
    if content["tensors"] is not None:
        folded = folded_paths(course.tensors)
        content["tensors"]["folded"] = [folded.get(path) for path in content["tensors"]["path"]]
    return content
