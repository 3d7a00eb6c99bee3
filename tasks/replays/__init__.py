"""Begin a replay of a step, and compare what it made."""
