"""Layout of the workspace: the only module that knows the names of its folders and files.

<workspace>/runs/<run>/{config.json, id.json}
                      /steps/000000/{prompts.jsonl, samples.parquet, ..., manifest.json}
                      /adapters/000001/{adapter_config.json, adapter_model.safetensors, ...}
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from infra.records import Step, StepRecord
from infra.settings import settings

MANIFEST = "manifest.json"
ID = "id.json"
REMOVED = "removed.json"
"""In the folder of an adapter that retention took files from."""
DELIVERED = "delivered.json"
"""In the folder of a step, an evaluation or a summary whose content MLflow has."""
PREFECT_PAGE = "prefect.json"
"""In the folder of a step, a run or a summary: addresses of pages of Prefect, by the flow's name."""
TIMELINE, CURVES, PAGE = "timeline.svg", "curves.svg", "report.md"
"""A report for people and its pictures, which it names."""
EVALUATION = "evaluation.json"


@dataclass(frozen=True)
class Workspace:
    """The files of this machine's programs, beside the runs."""

    path: Path

    @classmethod
    def here(cls) -> Self:
        return cls(settings().workspace)

    @property
    def layout_version(self) -> Path:
        return self.path / "workspace.json"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def logs(self) -> Path:
        """Folder: output of programs that belong to no step."""
        return self.path / "logs"

    @property
    def services(self) -> Path:
        """Folder: servers that were started here."""
        return self.path / "services"

    @property
    def deliveries(self) -> Path:
        """Folder: uploads to MLflow that are at work."""
        return self.services / "deliveries"

    @property
    def locks(self) -> Path:
        """Folder: files that processes lock."""
        return self.path / "locks"

    @property
    def models(self) -> Path:
        """Folder: models made here, and digests of base models."""
        return self.path / "models"

    @property
    def mlflow(self) -> Path:
        """Folder: database and artifacts of the MLflow server."""
        return self.path / "mlflow"

    @property
    def prefect(self) -> Path:
        """Folder: database of the Prefect server."""
        return self.path / "prefect"

    @property
    def fault(self) -> Path:
        """What the scripted engine shall do wrong, in a test."""
        return self.path / "fault"

    @property
    def engine_state(self) -> Path:
        """The living rollout engine."""
        return self.path / "engine.json"

    @property
    def engine_key(self) -> Path:
        """Its API key."""
        return self.path / "engine.key"

    @property
    def engine_launches(self) -> Path:
        """Number of engines launched so far."""
        return self.path / "engine-launches.json"

    @property
    def merged_weights(self) -> Path:
        """Folder: base models with an adapter merged in."""
        return self.path / "merged"

    @property
    def golden_references(self) -> Path:
        """Folder: answers that an engine must give again after a wake."""
        return self.path / "golden"

    @property
    def trainer_state(self) -> Path:
        """The living persistent trainer."""
        return self.path / "trainer.json"

    @property
    def trainer_call(self) -> Path:
        """The multi-node job that is called for."""
        return self.path / "trainer-call.json"

    @property
    def comparisons(self) -> Path:
        return self.path / "comparisons"


def runs_folder() -> Path:
    return Workspace.here().runs


def run_folder(run: str) -> Path:
    return runs_folder() / run


def step_folder(step: Step | StepRecord) -> Path:
    return step_folder_of(step.run, step.index if isinstance(step, Step) else step.step)


def step_folder_of(run: str, index: int) -> Path:
    return RunFolder.of(run).steps / f"{index:06d}"


def adapter_folder(run: str, version: int) -> Path:
    return RunFolder.of(run).adapters / f"{version:06d}"


@dataclass(frozen=True)
class TrainFolder:
    """The folder of a training job."""

    path: Path

    @property
    def result(self) -> Path:
        """What the trainer program reports."""
        return self.path / "result.json"

    @property
    def adapter(self) -> Path:
        """The next adapter, until it is published."""
        return self.path / "adapter"

    @property
    def job(self) -> Path:
        """What the trainer program is told to do."""
        return self.path / "job.json"

    @property
    def log(self) -> Path:
        """The trainer program's output."""
        return self.path / "trainer.log"

    @property
    def token_logprobs(self) -> Path:
        """The trainer's log-probability of each token, computed on first use."""
        return self.path / "token_logprobs.safetensors"

    @property
    def token_logprobs_inputs(self) -> Path:
        """The digests of the job and the batch that they were computed from."""
        return self.path / "token_logprobs.inputs_key.json"


@dataclass(frozen=True)
class RunFolder:
    """The files of a run."""

    path: Path

    @classmethod
    def of(cls, run: str) -> Self:
        return cls(run_folder(run))

    @property
    def config(self) -> Path:
        """The configuration that the run started with."""
        return self.path / "config.json"

    @property
    def resolved_config(self) -> Path:
        """Each value of the configuration with its source, as the command line wrote it."""
        return self.path / "resolved.json"

    @property
    def mlflow_address(self) -> Path:
        return self.path / "mlflow_address.json"

    @property
    def mlflow_run(self) -> Path:
        """The MLflow run."""
        return self.path / "mlflow.json"

    @property
    def seconds(self) -> Path:
        """Wall time of the whole run, for learning curves."""
        return self.path / "seconds.json"

    @property
    def origin(self) -> Path:
        """Of a run that starts with a replay: the step that it replays."""
        return self.path / "origin.json"

    @property
    def dataset_fingerprint(self) -> Path:
        return self.path / "dataset.json"

    @property
    def steps(self) -> Path:
        return self.path / "steps"

    @property
    def adapters(self) -> Path:
        return self.path / "adapters"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    @property
    def export(self) -> Path:
        """The model that a finished run leaves."""
        return self.path / "export"

    @property
    def report(self) -> Path:
        """RunReport of a finished run."""
        return self.path / "report.json"

    @property
    def prefect_page(self) -> Path:
        return self.path / PREFECT_PAGE

    @property
    def summary(self) -> "SummaryFolder":
        return SummaryFolder(self.path / "summary")

    def step(self, index: int) -> "StepFolder":
        return StepFolder(self.steps / f"{index:06d}")


@dataclass(frozen=True)
class StepFolder:
    """The files of a step, in the order in which they are written."""

    path: Path

    @classmethod
    def of(cls, step: Step | StepRecord) -> Self:
        return cls(step_folder(step))

    @classmethod
    def at(cls, run: str, index: int) -> Self:
        return cls(step_folder_of(run, index))

    @property
    def config(self) -> Path:
        """The configuration that the step is made with."""
        return self.path / "config.json"

    @property
    def began(self) -> Path:
        """When the latest attempt at the step began, in seconds since the epoch."""
        return self.path / "began.json"

    @property
    def prompts(self) -> Path:
        return self.path / "prompts.jsonl"

    @property
    def journal(self) -> Path:
        """Finished samples of a rollout that is under way."""
        return self.path / "samples.journal"

    @property
    def samples(self) -> Path:
        """All samples of a finished rollout."""
        return self.path / "samples.parquet"

    @property
    def left_over(self) -> Path:
        """Partial answers that the next step resumes."""
        return self.path / "left_over.parquet"

    @property
    def samples_inputs(self) -> Path:
        """The inputs that decided the samples, and the samples' digests."""
        return self.path / "samples.inputs_key.json"

    @property
    def scored(self) -> Path:
        return self.path / "scored.parquet"

    @property
    def assembled(self) -> Path:
        """The samples of the batch, with rewards and advantages."""
        return self.path / "assembled.parquet"

    @property
    def batch(self) -> Path:
        """The tensors that the trainer reads."""
        return self.path / "batch.safetensors"

    @property
    def train(self) -> TrainFolder:
        return TrainFolder(self.path / "train")

    @property
    def timings(self) -> Path:
        """Folder: a file for each verb."""
        return self.path / "measures"

    @property
    def memory(self) -> Path:
        """Folder: memory in use, a file for each phase."""
        return self.path / "memory"

    @property
    def system_metrics(self) -> Path:
        """Use of GPUs and processors over the step."""
        return self.path / "machine_load.json"

    @property
    def check_costs(self) -> Path:
        """Seconds that checks took, by kind."""
        return self.path / "promises.json"

    @property
    def timeline(self) -> Path:
        return self.path / TIMELINE

    @property
    def prefect_page(self) -> Path:
        return self.path / PREFECT_PAGE

    @property
    def replay(self) -> Path:
        """Of a replayed step: its digests beside those of the step that it replays."""
        return self.path / "replay.json"

    @property
    def bad_answers(self) -> Path:
        """Folder: answers of the engine that failed a check."""
        return self.path / "evidence"

    @property
    def page(self) -> Path:
        """The report for people."""
        return self.path / PAGE

    @property
    def report(self) -> Path:
        """StepReport."""
        return self.path / "report.json"

    @property
    def manifest(self) -> Path:
        """A step is committed when this exists."""
        return self.path / MANIFEST


@dataclass(frozen=True)
class SummaryFolder:
    """The report of a run, for people."""

    path: Path

    @property
    def page(self) -> Path:
        return self.path / PAGE

    @property
    def curves(self) -> Path:
        return self.path / CURVES

    @property
    def prefect_page(self) -> Path:
        return self.path / PREFECT_PAGE


@dataclass(frozen=True)
class EvaluationFolder:
    """The files of one adapter's evaluation."""

    path: Path

    @property
    def record(self) -> Path:
        return self.path / EVALUATION

    @property
    def questions(self) -> Path:
        return self.path / "prompts.jsonl"

    @property
    def greedy(self) -> Path:
        """Greedy answers."""
        return self.path / "greedy.parquet"

    @property
    def sampled(self) -> Path:
        """Sampled answers, for pass@k."""
        return self.path / "sampled.parquet"


@dataclass(frozen=True)
class ExportFolder:
    """What a finished run leaves."""

    path: Path

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def merged(self) -> Path:
        return self.path / "merged"
