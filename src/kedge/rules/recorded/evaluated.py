"""The outputs of an evaluation beside those of the training around it."""

from __future__ import annotations

import numpy as np

from kedge.rules.recorded.course import Course
from kedge.rules.recorded.trained import steps_of_training
from kedge.store.events import OutputSize
from kedge.store.recording import Recording

#: Measured steps around an evaluation whose outputs it is compared with.
_NEAR = 5


def size_in_training(recording: Recording, root: int, size: OutputSize) -> float:
    """Return the median size of an output in the measured steps nearest to an evaluation.

    Args:
        recording: The recording.
        root: The model.
        size: The size in the evaluation.

    Returns:
        A root mean square; 0 if it is not known.
    """
    site = next((each for each in recording.of_kind("out") if each.site == size.site), None)
    if site is None:
        return 0.0
    course = Course.of(recording, site, "rms")
    course = course.where(np.isin(course.steps, steps_of_training(recording, root)))
    if not len(course):
        return 0.0
    nearest = np.argsort(np.abs(course.steps - size.step), kind="stable")[:_NEAR]
    return float(np.median(course.values[nearest]))
