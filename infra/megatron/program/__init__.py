"""The trainer program's own work: check the job, set up, step, write the result."""
