"""Adapters that other software made: their folders, and one that judges for a run."""
