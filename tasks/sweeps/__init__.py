"""Begin a sweep and its variants."""
