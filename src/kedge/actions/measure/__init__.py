"""The action `measure`: the statistics of values, computed on their device, in one table a step."""
