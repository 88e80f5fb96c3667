"""Modules whose calls keep nothing of what they save, and are run again in backward."""
