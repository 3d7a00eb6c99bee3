"""A run's files on disk: manifests, lineage, replays, evaluations, retention."""
