"""Rules about the training: its losses, batches and modes."""
