"""Open a comparison: check everything before anything is started, and continue with the results of earlier attempts."""

import logging

from prefect import task

from infra.comparison import preflight
from infra.comparison.config import ComparisonConfig, digest_of
from infra.comparison.measurement import load, reused_blocks
from infra.comparison.paths import adapter_folder, state_folder
from infra.models import base_model
from infra.records import BaseModelRef
from infra.store.files import open_workspace, write_json
from tasks.support.caching import NO_CACHE

log = logging.getLogger(__name__)


def check_comparison(config: ComparisonConfig) -> None:
    """Check a comparison. Raises ValueError with one line for each thing that cannot work."""
    open_workspace()
    folder = base_model.locate(config.model)
    base_model.check_supported(folder)
    longest, positions = config.max_input_tokens + config.max_output_tokens, base_model.num_positions(folder)
    if longest > positions:
        raise ValueError(
            f"max_input_tokens + max_output_tokens = {longest} is more than the {positions} positions of {config.model!r}"
        )
    for backend in config.backends:
        config.engine(backend)  # checks its flags
    if not config.skip_preflight:
        preflight.check(config)


def make_adapters(config: ComparisonConfig, base: BaseModelRef, digest: str) -> None:
    """Make adapter version 1, from which training starts. Mode inference adds one adapter for each step. They are the same for all engines."""
    last = 1 if config.mode == "training" else config.num_steps + 1
    for version in range(1, last + 1):
        folder = adapter_folder(digest, version)
        if not folder.exists():
            is_trainable = config.mode == "training"
            load.make_adapter(folder, base, config.trainer.lora, config.seed + version, is_trainable=is_trainable)


@task(cache_policy=NO_CACHE)
def begin_comparison(config: ComparisonConfig) -> str:
    """ComparisonConfig -> its digest, which names its state in the workspace. Finished blocks of the output folder are reused.

    Raises:
        ValueError: for anything that cannot work, and for blocks that were measured elsewhere.
    """
    check_comparison(config)
    base = base_model.reference(config.model)
    digest = digest_of(config, base.sha256)
    write_json(state_folder(digest) / "config.json", config.model_dump(mode="json"))
    reused_blocks.take_up(config, digest)
    make_adapters(config, base, digest)
    log.info("comparison %s, in %s", digest, state_folder(digest))
    return digest
