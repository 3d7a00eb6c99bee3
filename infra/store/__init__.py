"""The workspace on disk: files written whole or not at all, digests, samples, the digest of our code."""
