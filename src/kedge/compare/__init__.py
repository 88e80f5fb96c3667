"""Two recordings compared: the sites that they share, their first difference, its size and its cause."""
