"""The parts of a recording that rules read: roots, weights, losses, optimizers, the ledger, and numbers of samples."""
