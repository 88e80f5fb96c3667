"""The run around a watcher: its beginning and end, its recording, and its messages to the user."""
