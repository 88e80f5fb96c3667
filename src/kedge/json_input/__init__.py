"""JSON of files that may be damaged or hostile: how it is read, and what shape its values have."""
