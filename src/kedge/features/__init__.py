"""Values from inside a model: of one call, of a whole data set, and summarized."""
