"""A kept step of a run, run again by the program itself: as it was, and otherwise."""
