"""What is there already: the hooks on a model, the graph that autograd has made, the operations of a forward."""
