"""The decision over each saved tensor, and what it rests on."""
