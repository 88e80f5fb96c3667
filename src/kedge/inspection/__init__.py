"""Views of existing things: the hooks on a model, the autograd graph, the operations of a forward."""
