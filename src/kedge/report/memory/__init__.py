"""The memory of one step as a page of its own."""
