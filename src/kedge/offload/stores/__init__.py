"""Where moved bytes are held: the host's memory, or a file."""
