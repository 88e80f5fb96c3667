"""Acting on findings while the program runs: stopping it, raising, skipping a step, keeping its state."""
