"""Fitted readers: what a text or a row says, with probabilities."""
