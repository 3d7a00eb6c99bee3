"""The workspace on disk: files written atomically, digests, samples, the digest of our code."""
