"""Steps of a run that are kept, to be run again later."""
