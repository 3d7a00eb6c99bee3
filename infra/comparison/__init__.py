"""Rollout engines measured under the same RL loop: what is fair, what is measured, what the figures say."""
