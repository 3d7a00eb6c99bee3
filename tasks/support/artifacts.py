"""Reports on the pages of Prefect runs, with links to MLflow."""

from pathlib import Path

from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.context import FlowRunContext
from prefect.utilities.urls import url_for

from infra.eval_records import RunReport
from infra.records import StepReport
from infra.reporting.names import step_name
from infra.store.files import write_json
from infra.store.layout import RunFolder
from infra.tracking import mlflow_store
from tasks.support.progress_artifacts import key_of


def mlflow_page(run: str) -> str | None:
    """Return the address of a run's own page in MLflow. None if MLflow has no server, or nothing of the run yet."""
    mlflow_run = mlflow_store.known_run(run)
    return mlflow_store.run_url(mlflow_run, run) if mlflow_run else None


def show_step(made: StepReport, report: str) -> None:
    """Put a step's report on the page of its Prefect run, with a link to MLflow. A single artifact: each one is a call, a row and an event."""
    url = mlflow_page(made.run)
    link = f"\n[{made.run} in MLflow]({url})\n" if url else ""
    name = step_name(made.run, made.step)
    create_markdown_artifact(report + link, key=key_of(name), description=f"{name}: reward {made.metrics['reward/mean']:.3g}")


def show_run(made: RunReport, report: str) -> None:
    """Put a run's report on the page of its Prefect run, with a link to MLflow."""
    about = f"{made.run}: {made.outcome}, best adapter {made.best.version}"
    create_markdown_artifact(report, key=key_of(made.run, "report"), description=about)
    link_to_mlflow(made.run)


def link_to_mlflow(run: str) -> None:
    """Put a link to a run's page in MLflow on the page of its Prefect run."""
    if url := mlflow_page(run):
        create_link_artifact(url, link_text=f"{run} in MLflow", key=key_of(run, "mlflow"))


def page_of_this_flow() -> dict[str, str]:
    """Return the flow's name -> the address of this flow run's page. Empty if the server ends with the flow and cannot show it."""
    context = FlowRunContext.get()
    if context is None or context.flow is None or context.flow_run is None:
        return {}
    url = url_for("flow-run", obj_id=context.flow_run.id)
    return {context.flow.name: url} if url else {}


def note_run_page(run: str) -> Path:
    """Record in the run's folder the address of the flow run's page."""
    return write_json(RunFolder.of(run).prefect_page, page_of_this_flow())
