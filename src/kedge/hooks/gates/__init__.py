"""Gates: what stands at one kind of place in a program, and hands what passes there to its taps."""
