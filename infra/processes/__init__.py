"""Child programs: started, logged, found again, ended; and the lock that gives the GPUs to one run at a time."""
