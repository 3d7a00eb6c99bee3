"""What a step will take, before it is made: measured points of GPUs, a small model fitted to them, and what this machine has measured itself."""
