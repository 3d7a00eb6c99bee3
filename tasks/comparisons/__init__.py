"""Measure rollout engines side by side."""
