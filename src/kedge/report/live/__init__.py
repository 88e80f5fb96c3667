"""A run in the terminal, while it runs. The only folder that imports textual."""
