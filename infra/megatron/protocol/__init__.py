"""What the trainer program and the code that runs it share, without torch: jobs, mailbox, optimizer files."""
