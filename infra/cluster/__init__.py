"""Programs on several machines: Ray places one agent on each node, which starts, watches and ends our programs there."""
