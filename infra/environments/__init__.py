"""Episodes of several turns: environments and agents in worker processes, which sample from the engine through the gateway."""
