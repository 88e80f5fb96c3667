"""What rules read out of a recording: roots, weights, losses, optimizers, the ledger, and how many samples there are."""
