"""A run's life on disk: manifests, lineage, replays, evaluations, retention."""
