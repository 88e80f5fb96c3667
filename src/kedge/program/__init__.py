"""The user's program, run in this process as python would run it."""
