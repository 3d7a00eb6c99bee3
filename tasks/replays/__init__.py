"""Start a replay of a step, and compare its results."""
