"""A tiny language model of our own, for machines without a GPU or a network: `python -m infra.tiny_model OUT_DIR`."""
