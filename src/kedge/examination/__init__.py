"""The examination of a training before it runs: trials on its model, its batch, its loss and its optimizer."""
