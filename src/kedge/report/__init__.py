"""For eyes: recordings and findings, drawn."""
