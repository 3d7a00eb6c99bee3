"""Copies of runs outside this machine, at RATCHET_STORE_URL, and runs that go on from such a copy."""
