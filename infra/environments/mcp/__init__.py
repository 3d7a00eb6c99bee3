"""Tools of MCP servers: a client of our own for the two transports, and the tools as an episode has them."""
