"""Samples of several turns: which of their tokens count in the loss, and the advantage of each turn."""
