"""Publish the results of a comparison: files, MLflow, the page of the Prefect run."""

import logging

from prefect import task
from prefect.artifacts import create_markdown_artifact

from infra.comparison import delivery, report
from infra.comparison.config import ComparisonConfig
from infra.comparison.paths import output_folder
from infra.comparison.results import read_results, write_output
from tasks.support.caching import NO_CACHE
from tasks.support.progress_artifacts import key_of

log = logging.getLogger(__name__)


@task(cache_policy=NO_CACHE)
def finish_comparison(config: ComparisonConfig, digest: str) -> str:
    """Digest -> the output folder."""
    results = read_results(config, digest)
    files = write_output(results)
    run_id = delivery.deliver(results, files)
    name = "-".join(config.backends)
    create_markdown_artifact(
        report.markdown(results), key=key_of(config.name, "engines"), description=f"{name}, mode {config.mode}"
    )
    log.info("report in %s, MLflow run %s", output_folder(config), run_id or "not delivered")
    return str(output_folder(config))
