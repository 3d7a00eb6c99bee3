"""What became of a run's samples, counted from its files."""
