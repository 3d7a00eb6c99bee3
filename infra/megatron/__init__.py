"""The trainer program: `torchrun -m infra.megatron job.json`. Knows nothing of Prefect or MLflow."""
