"""The bill: who holds how much of what backward needs, when, and what would free it."""
