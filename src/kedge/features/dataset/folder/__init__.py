"""A folder of features: what run it is of, its shards, and reading them."""
