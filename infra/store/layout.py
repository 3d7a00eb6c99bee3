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


def runs_folder() -> Path:
    return settings().workspace / "runs"


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
    def page(self) -> Path:
        """The report for people."""
        return self.path / "report.md"

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
        return self.path / "samples.made_from.json"

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
    def bad_answers(self) -> Path:
        """Folder: answers of the engine that failed a check."""
        return self.path / "evidence"

    @property
    def page(self) -> Path:
        """The report for people."""
        return self.path / "report.md"

    @property
    def manifest(self) -> Path:
        """A step is committed when this exists."""
        return self.path / MANIFEST
