"""What the trainer program and the code that runs it share, without torch: jobs, job queue, optimizer files."""
