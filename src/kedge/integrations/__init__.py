"""Kedge inside other tools: one file for each, imported only where that tool is installed."""
