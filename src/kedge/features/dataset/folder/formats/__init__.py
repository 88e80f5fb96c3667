"""How a shard is written to the disk: one file for each format."""
