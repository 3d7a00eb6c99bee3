"""Adapter and optimizer state on their way to files, and in memory between two jobs."""
