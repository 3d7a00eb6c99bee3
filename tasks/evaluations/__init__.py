"""Find an adapter, evaluate it and record the result."""
