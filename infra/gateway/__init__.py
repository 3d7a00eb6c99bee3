"""The gateway: agents that speak OpenAI's protocol sample from the engine through it, and every token that they get is on record."""
