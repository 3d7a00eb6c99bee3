"""The program `ratchet`: what its commands share; work/ makes and changes runs, look/ shows, services/ starts and ends."""
