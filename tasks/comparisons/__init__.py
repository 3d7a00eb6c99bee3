"""Measure and compare rollout engines."""
