"""A run in the terminal while it runs. Only this folder imports textual."""
