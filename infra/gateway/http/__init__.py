"""The gateway's HTTP side: OpenAI's endpoints, read strictly, and one server on loopback."""
