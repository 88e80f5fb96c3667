"""Hooks and modes: their installation, their events, and the path of values to the actions."""
