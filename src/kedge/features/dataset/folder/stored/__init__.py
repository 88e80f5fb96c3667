"""Reading of stored shards: the samples in their order, and the columns of their values and texts."""
