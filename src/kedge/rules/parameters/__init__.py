"""Rules about parameters and modules that are not trained, and about the steps that an optimizer takes."""
