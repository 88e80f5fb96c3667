"""The formats of shards on the disk: one module for each."""
