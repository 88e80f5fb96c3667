"""A recording as one HTML page: Python condenses it, the page's own script draws it."""
