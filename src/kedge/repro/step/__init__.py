"""The examination of a bad step: its lines run again in a copy of the process, where every operation is seen."""
