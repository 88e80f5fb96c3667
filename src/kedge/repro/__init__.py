"""The call that made the first value that is not finite, kept so that it can be run again alone."""
