"""Tasksets of verifiers: they run unmodified in verifiers' own environment, and their turns come to the run's engine through the gateway."""
