"""A recording as one HTML page: Python condenses it, and the page's script draws it."""
