"""The servers that the flows need: Prefect's API and worker, MLflow; schedules and the detection of crashed flow runs."""
