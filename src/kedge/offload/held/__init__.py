"""What stands in for a saved tensor, and the entries of bytes that several share."""
