"""Several recordings in one table and one page: their options, verdicts and losses, and their sites side by side."""
