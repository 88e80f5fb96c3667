"""Gates: hooks at one kind of place in a program, which pass the values there to their taps."""
