"""The rows of ``capabilities.py``: what can be asked of a tool that looks into models, each as a program that is run."""
