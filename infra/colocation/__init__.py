"""How engine and trainer share the GPUs: the plan, and the confirmation that memory was released."""
