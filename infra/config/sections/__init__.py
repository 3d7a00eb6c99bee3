"""The sections of a run's configuration, one module each."""
