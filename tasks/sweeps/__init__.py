"""Start a sweep and its variants."""
