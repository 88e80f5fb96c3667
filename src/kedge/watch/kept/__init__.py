"""What a watch keeps of a program: its state, and the steps that can run again later."""
