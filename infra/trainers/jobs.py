"""Make the trainer program's job from records, after checking that its inputs are what was recorded."""

import logging
import os
from pathlib import Path

from infra.config import TrainerConfig
from infra.machine import devices
from infra.megatron.protocol import shared_experts
from infra.megatron.protocol.job import ADAPTER_WEIGHTS, TrainJob
from infra.models import base_model
from infra.processes import child_environment
from infra.records import AdapterVersion, TrainBatch
from infra.settings import settings
from infra.store import digests
from infra.store.files import verified, verified_adapter
from infra.store.layout import TrainFolder, Workspace, adapter_folder

log = logging.getLogger(__name__)


def job_without_batch(config: TrainerConfig, adapter: AdapterVersion) -> TrainJob:
    """Return what is known of an adapter's next job before its samples are: enough to start the program that will do it. Its files are
    neither checked nor named."""
    return TrainJob(
        model_path=base_model.locate(adapter.base.id),
        base_model_id=base_model.lasting_name(adapter.base),
        base_sha256=adapter.base.sha256,
        adapter_path=None,
        adapter_version=adapter.version,
        adapter_sha256=adapter.sha256,
        num_optimizer_steps=adapter.num_optimizer_steps,
        batch_path=Path(),
        output_dir=Path(),
        result_path=Path(),
        seed=adapter.seed,
        num_threads=_threads_per_process(config.num_processes),
        device=devices.device(),
        switches=child_environment.switches("trainer"),
        trainer=config,
    )


def job_of(config: TrainerConfig, batch: TrainBatch, adapter: AdapterVersion, folder: Path) -> TrainJob:
    """Make the trainer program's job. Checks that its inputs match their recorded digests."""
    is_older = _is_older(config, batch, adapter)
    for moment in adapter.moments.values():
        verified(moment)
    files = {
        "adapter_path": verified_adapter(adapter) if adapter.weights else None,
        "moments_sha256": {name: moment.sha256 for name, moment in adapter.moments.items()},
        "sampler_version": batch.adapter_version if is_older else None,
        "sampler_sha256": batch.adapter_sha256 if is_older else None,
        "batch_path": verified(batch.file),
        "output_dir": TrainFolder(folder).adapter,
        "result_path": TrainFolder(folder).result,
        "shared_experts": _engine_experts() if config.share_experts else None,
    }
    return TrainJob.model_validate(dict(job_without_batch(config, adapter)) | files)


def _engine_experts() -> Path | None:
    path = Workspace.here().shared_experts
    if shared_experts.of_living_engine(path) is not None:
        return path
    log.warning("the engine whose experts the trainer computes with has ended: it reads them from the model's files")
    return None


def _is_older(config: TrainerConfig, batch: TrainBatch, adapter: AdapterVersion) -> bool:
    """Whether the batch was sampled by an older adapter.

    Raises:
        ValueError: if that adapter was not allowed to sample it.
    """
    sampler = (batch.adapter_version, batch.adapter_sha256)
    if sampler == (adapter.version, adapter.sha256):
        return False
    if 0 < adapter.version - batch.adapter_version <= config.loss.correction.max_staleness and _is_known(batch):
        return True
    raise ValueError(
        f"batch of step {batch.step} was sampled by adapter {sampler[0]} ({sampler[1]}), the trainer would go on from adapter "
        f"{adapter.version} ({adapter.sha256}), with trainer.loss.correction.max_staleness {config.loss.correction.max_staleness}"
    )


def _is_known(batch: TrainBatch) -> bool:
    """Whether the run's adapter of that version sampled the batch. True if unknown: a replay may import samples without their adapter."""
    weights = adapter_folder(batch.run, batch.adapter_version) / ADAPTER_WEIGHTS
    if weights.exists():
        return digests.sha256_of(weights) == batch.adapter_sha256
    return batch.adapter_version > 0 or batch.adapter_sha256 == "base"


def _threads_per_process(num_processes: int) -> int:
    cores = settings().num_cpu_threads or os.cpu_count() or 1
    # On a cluster a job may be done again with all processes on one node: equal numbers of threads give equal bits.
    return max(1, cores // num_processes)
