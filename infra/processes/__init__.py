"""Start, log, find and end child programs; and the lock that gives the GPUs to one run at a time."""
