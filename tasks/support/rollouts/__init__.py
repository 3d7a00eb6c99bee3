"""What a rollout does besides sampling: it goes on with another adapter."""
