"""What is measured while a step runs: timings, CPU, GPUs and memory."""
