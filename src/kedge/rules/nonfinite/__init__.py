"""NAN-BORN: where the first value that is not finite was made, and the words for it."""
