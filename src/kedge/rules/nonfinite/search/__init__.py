"""The search for births in the states of one step; free of words."""
