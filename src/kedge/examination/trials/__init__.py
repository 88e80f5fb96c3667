"""The trials of an examination, each in a file of its own that says what it does and what it cannot see."""
