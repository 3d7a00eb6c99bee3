"""Base models: where they lie, their digests, tokenizers and architectures."""
