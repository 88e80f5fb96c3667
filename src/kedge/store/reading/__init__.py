"""The files of a recording, read: its JSON, and the rows of its Arrow streams by rank and site."""
