"""The firing of actions: taps, schedules, checks of returned values, and causes of silence."""
