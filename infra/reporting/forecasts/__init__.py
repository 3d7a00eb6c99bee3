"""A run's forecast beside what was measured."""
