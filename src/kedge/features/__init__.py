"""Values out of the middle of a model: of one call, of a whole data set, and summed up."""
