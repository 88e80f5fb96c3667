"""Rules about the training: its gradients, losses, optimizers and modes."""
