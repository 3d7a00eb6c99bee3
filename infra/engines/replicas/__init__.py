"""Several servers that share the rollouts of one engine."""
