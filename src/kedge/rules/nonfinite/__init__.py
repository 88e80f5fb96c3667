"""NAN-BORN: the place where the first non-finite value was made, and the words for it."""
