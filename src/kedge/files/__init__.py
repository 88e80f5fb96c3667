"""Files: written whole or not at all, locked, and kept apart from the open files of the program."""
