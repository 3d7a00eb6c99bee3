"""The layout of a run on this machine and the forecast of its steps."""
