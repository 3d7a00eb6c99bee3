"""SGLang: its command line, its generate API and its memory API."""
