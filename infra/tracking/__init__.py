"""The interface to MLflow: a step's files on disk are uploaded to the store once and in order."""
