"""What every engine that is a server program does alike: its process, its requests, its merged weights."""
