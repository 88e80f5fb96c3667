"""A folder of features: its manifest, its shards, and reading them."""
