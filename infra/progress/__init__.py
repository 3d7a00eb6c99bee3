"""Progress of long work: counts, and bars for a terminal."""
