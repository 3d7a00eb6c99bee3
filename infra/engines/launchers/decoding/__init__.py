"""Patches of SGLang that make its decoding steps shorter, loaded by `sglang_server.py`."""
