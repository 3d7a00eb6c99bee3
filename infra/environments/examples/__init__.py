"""Environments that ship as examples."""
