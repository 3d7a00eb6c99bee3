"""Programs that run inside an engine's own environment; they import nothing of ours."""
