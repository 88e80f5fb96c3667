"""Facts about a training that its numbers do not show; docs/recording.md describes the note on each."""
