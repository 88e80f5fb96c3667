"""The files of a recording, written: its folder, its Arrow stream, and the lock of its writers."""
