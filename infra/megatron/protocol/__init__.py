"""What the trainer program and the code that runs it share: jobs, mailbox, optimizer files. No torch in here."""
