"""The run around a watch: how it begins and ends, where its recording goes, and what the user is told."""
