"""Find an adapter, evaluate it, record what came out."""
