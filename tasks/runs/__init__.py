"""Start and finish a run, and apply its retention rules."""
