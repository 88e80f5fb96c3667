"""Two recordings compared: which sites are the same, where they part, by how much, and why."""
