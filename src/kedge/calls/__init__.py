"""Calls of Kedge's functions: what does not fit is explained, and packages can be called."""
