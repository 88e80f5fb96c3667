"""Watching a program that runs already, from another process, and letting it go again."""
