"""The words for a birth: messages, evidence and remedies."""
