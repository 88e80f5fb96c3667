"""One event through its actions: taps, schedules, what an action may return, and why nothing fired."""
