"""Attribution: the parts of an input that a model's output depends on, by methods made of hooks alone."""
