"""The memory of one step: as a page of its own, and as tables in a terminal."""
