"""Facts about a training that its numbers do not show; docs/reference/recording.md describes the note on each."""
