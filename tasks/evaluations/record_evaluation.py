"""Publish the results of an evaluation."""

from prefect import task
from prefect.artifacts import create_markdown_artifact

from infra.eval_records import Evaluation
from infra.reporting.names import evaluation_name
from infra.store.files import path_of, write_json
from infra.store.layout import EvaluationFolder
from infra.tracking import upload
from tasks.support.artifacts import page_of_this_flow
from tasks.support.caching import NO_CACHE
from tasks.support.progress_artifacts import key_of


def markdown_of(made: Evaluation) -> str:
    rows = "\n".join(f"| {name} | {value:.4f} |" for name, value in made.metrics.items())
    warning = (
        f"\n{made.num_overlapping} of these questions are in the training set too: the figures say too much.\n"
        if made.num_overlapping
        else ""
    )
    of_set = f", set {made.set_name}" if made.set_name else ""
    return (
        f"# {made.run}, adapter {made.step}{of_set}\n\n{made.num_prompts} held-out questions, evaluation `{made.eval_digest}`\n{warning}\n"
        f"| metric | value |\n|--|--:|\n{rows}\n"
    )


@task(cache_policy=NO_CACHE)
def record_evaluation(made: Evaluation) -> None:
    """Evaluation -> MLflow, and the page of the Prefect run."""
    write_json(EvaluationFolder(path_of(made.file).parent).prefect_page, page_of_this_flow())
    upload.start()
    name = evaluation_name(made.run, made.step) + (f"/{made.set_name}" if made.set_name else "")
    create_markdown_artifact(
        markdown_of(made),
        key=key_of(name),
        description=f"{name}: pass@1 {made.pass_at_1:.3f} of {made.num_prompts} held-out questions",
    )
