"""The command line: one file for each command, which is why there are so many, and the parts that several share."""
