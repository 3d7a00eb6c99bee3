"""The trainer program, `torchrun -m infra.megatron job.json`, which knows nothing of Prefect or MLflow."""
