"""The servers beside the flows: Prefect's API and worker, MLflow; schedules and the detection of crashed flow runs."""
