"""The section `environment`: MCP servers and tasksets that it may name."""
