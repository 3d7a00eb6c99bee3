"""Commands for the servers, the engine and the machine, one file each."""
