"""Which sites of two recordings are the same site: by their names, or by their place in the data's flow."""
