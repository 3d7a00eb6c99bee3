"""Measuring one engine: its load, its steps, its memory."""
