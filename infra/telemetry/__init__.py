"""Measurements while a step runs: timings, CPU, GPUs and memory."""
