"""What a step shows on the page of its Prefect run."""

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from infra import devices, tracking
from infra.config import TrackingConfig
from infra.files import read_json_lines, step_folder
from infra.records import StepReport
from infra.samples import Sample, groups_of, read_samples
from tasks.assemble import SAMPLES_FILE
from tasks.draw_prompts import FILE as PROMPTS_FILE


def markdown_of(made: StepReport, hand_over: devices.Plan) -> str:
    rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in sorted(made.metrics.items()))
    return (
        f"# {made.run}, step {made.step}\n\nAdapter version **{made.adapter.version}**, SHA-256 `{made.adapter.sha256}`\n\n"
        f"Hand-over plan **{hand_over.hand_over}**: {hand_over.reason}\n\n| metric | value |\n|--|--:|\n{rows}\n"
    )


def best_and_worst(samples: list[Sample], count: int) -> list[Sample]:
    """Of as many groups as fit, the sample with the highest and the one with the lowest reward."""
    chosen: list[Sample] = []
    for group in groups_of(samples):
        ranked = sorted(group, key=lambda sample: sample.reward or 0.0)
        chosen += [ranked[-1], ranked[0]]
    return chosen[:count]


def key_of(run: str) -> str:
    """What the keys of a run's artifacts begin with: small letters, digits and dashes, as Prefect wants them."""
    return run.lower().replace(".", "-").replace("_", "-")


def show(made: StepReport, hand_over: devices.Plan, config: TrackingConfig, mlflow_run: str | None) -> None:
    """A Markdown report, a table of samples and a link to MLflow."""
    key = key_of(made.run)
    create_markdown_artifact(markdown_of(made, hand_over), key=f"{key}-step", description=f"step {made.step} of {made.run}")
    questions = {row["prompt_id"]: row["question"] for row in read_json_lines(step_folder(made) / PROMPTS_FILE)}
    samples = best_and_worst(read_samples(step_folder(made) / SAMPLES_FILE), config.num_samples_shown)
    rows = [
        {"prompt": questions[sample.prompt_id], "completion": sample.text, "reward": sample.reward, "advantage": sample.advantage}
        for sample in samples
    ]
    create_table_artifact(rows, key=f"{key}-samples", description=f"best and worst samples of step {made.step}")
    if mlflow_run and (url := tracking.run_url(mlflow_run, made.run)):
        create_link_artifact(url, link_text=f"{made.run} in MLflow", key=f"{key}-mlflow")
