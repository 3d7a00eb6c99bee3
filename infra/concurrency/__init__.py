"""Threads and event loops: background work, prefetching, polling."""
