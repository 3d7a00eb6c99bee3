"""Tasks of inspect-ai: they run in its own environment, and their requests come to the run's engine through the gateway."""
