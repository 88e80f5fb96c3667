"""Watching as a whole: hooks that measure, and the recording that what they see is written to."""
