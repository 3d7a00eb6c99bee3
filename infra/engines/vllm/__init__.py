"""vLLM: its command line and its completions API."""
