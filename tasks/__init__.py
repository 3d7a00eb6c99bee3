"""WHAT: one verb a file; the pure function first, its Prefect task under it."""
