"""Layout of the workspace: the only module that knows the names of its folders and files.

<workspace>/runs/<run>/{config.json, id.json}
                      /steps/000000/{prompts.jsonl, samples.parquet, ..., manifest.json}
                      /adapters/000001/{adapter_config.json, adapter_model.safetensors, ...}
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from infra.records import Step, StepRecord
from infra.settings import settings

MANIFEST = "manifest.json"
ID = "id.json"
REMOVED = "removed.json"
"""In the folder of an adapter from which retention removed files."""
DELIVERED = "delivered.json"
"""In the folder of a step, an evaluation or a summary that was uploaded to MLflow."""
PREFECT_PAGE = "prefect.json"
"""In the folder of a step, a run or a summary: addresses of Prefect's pages, by flow name."""
TIMELINE, CURVES, PAGE = "timeline.svg", "curves.svg", "report.md"
"""A report for people, and the pictures that it shows."""
EVALUATION = "evaluation.json"
REPORT = "report.json"
PAID = "paid.jsonl"
"""In the folder of a step or an evaluation: the answers of a model that judges which it paid, as the ledger has them."""
JUDGE = -1
"""Number of the judge's server among the engine's replicas, which are counted from 0."""


class Inside:
    """A file or a folder inside a folder of the workspace: `StepFolder.at("mine", 3).samples` is the path of that file."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: "Folder", owner: type) -> Path:
        return folder.path / self.name


class Folder(Protocol):
    @property
    def path(self) -> Path: ...


@dataclass(frozen=True)
class Workspace:
    """The files of this machine's programs, next to the runs."""

    path: Path

    @classmethod
    def here(cls) -> Self:
        return cls(settings().workspace)

    layout_version = Inside("workspace.json")
    runs = Inside("runs")
    logs = Inside("logs")
    """Folder: output of programs that do not belong to a step."""
    services = Inside("services")
    """Folder: servers that were started here."""
    deliveries = Inside("services/deliveries")
    """Folder: uploads to MLflow in progress."""
    upload_request = Inside("services/upload-request.json")
    """The latest request to upload what waits."""
    locks = Inside("locks")
    """Folder: files that processes lock."""
    locks_of_nodes = Inside("locks/nodes")
    """Folder: for each node of a cluster that has no GPU, the files that its programs lock."""
    ray_head = Inside("services/ray.json")
    """The Ray cluster that was started here."""
    ray_token = Inside("services/ray.token")
    """Its token."""
    ray_session = Inside("ray")
    """Folder: its sockets and logs."""
    models = Inside("models")
    """Folder: models made here, and digests of base models."""
    mlflow = Inside("mlflow")
    """Folder: database and artifacts of the MLflow server."""
    prefect = Inside("prefect")
    """Folder: database of the Prefect server."""
    fault = Inside("fault")
    """The fault of the scripted engine, in a test."""
    engine_state = Inside("engine.json")
    """State of the running rollout engine; of its first replica, if it has several."""
    engine_key = Inside("engine.key")
    """Its API key."""
    judge_state = Inside("judge.json")
    """State of the running server of a model that judges."""
    judge_key = Inside("judge.key")
    """Its API key."""
    engine_launches = Inside("engine-launches.json")
    """Number of engines launched so far."""
    kernels = Inside("kernels")
    """Folder: kernels that engine and trainer have compiled, by GPU and versions."""
    shared_experts = Inside("experts/experts.json")
    """Where the engine's experts are, for a trainer that shares them; on a CPU with their values beside it."""
    merged_weights = Inside("merged")
    """Folder: base models with an adapter merged in."""
    golden_references = Inside("golden")
    """Folder: log-probs that an engine must reproduce after a wake."""
    trainer_state = Inside("trainer.json")
    """State of the running persistent trainer."""
    fetched = Inside("fetched")
    """Folder: runs that are being fetched from a store."""
    store_writer = Inside("store-writer.json")
    """Id of this workspace, for stores that several machines write to."""
    microbatches = Inside("microbatches.json")
    """Memory that training took, by model, layout and GPU."""
    rates = Inside("rates.json")
    """Tokens per second and memory that runs measured, by model, GPU and layout."""
    comparisons = Inside("comparisons")
    judge_adapters = Inside("judge-adapters")
    """Folder: adapters that judge for runs, by digest."""
    judgements = Inside("judgements.sqlite")
    """What models that judge have answered, and what was paid for it."""

    def state_of_replica(self, replica: int) -> Path:
        """The state of one of the engine's servers: `engine.json`, `engine-1.json`, ...; of the judge's: `judge.json`."""
        if replica == JUDGE:
            return self.judge_state
        return self.path / f"engine-{replica}.json" if replica else self.engine_state

    def key_of_replica(self, replica: int) -> Path:
        if replica == JUDGE:
            return self.judge_key
        return self.path / f"engine-{replica}.key" if replica else self.engine_key

    def recorded_replicas(self) -> list[int]:
        """Numbers of the engine's servers that have a state, in order, and last that of the judge's."""
        found = [int(path.stem.removeprefix("engine-")) for path in self.path.glob("engine-[0-9]*.json")]
        judge = [JUDGE] if self.judge_state.exists() else []
        return [*([0] if self.engine_state.exists() else []), *sorted(found), *judge]


def runs_folder() -> Path:
    return Workspace.here().runs


def run_folder(run: str) -> Path:
    return runs_folder() / run


def step_folder(step: Step | StepRecord) -> Path:
    """The folder of a step, or of one of its draws."""
    folder = step_folder_of(step.run, step.index if isinstance(step, Step) else step.step)
    return StepFolder(folder).draw(step.draw) if step.draw else folder


def step_folder_of(run: str, index: int) -> Path:
    return RunFolder.of(run).steps / f"{index:06d}"


def adapter_folder(run: str, version: int) -> Path:
    return RunFolder.of(run).adapters / f"{version:06d}"


@dataclass(frozen=True)
class TrainFolder:
    """The folder of a training job."""

    path: Path

    result = Inside("result.json")
    """Result of the trainer program."""
    adapter = Inside("adapter")
    """The next adapter, until it is published."""
    job = Inside("job.json")
    """Job of the trainer program."""
    log = Inside("trainer.log")
    """The trainer program's output."""
    token_logprobs = Inside("token_logprobs.safetensors")
    """The trainer's log-prob of each token, computed on first use."""
    token_logprobs_inputs = Inside("token_logprobs.inputs_key.json")
    """The digests of the job and the batch from which they were computed."""


@dataclass(frozen=True)
class RunFolder:
    """The files of a run."""

    path: Path

    @classmethod
    def of(cls, run: str) -> Self:
        return cls(run_folder(run))

    config = Inside("config.json")
    """The configuration that the run started with."""
    resolved_config = Inside("resolved.json")
    """Each value of the configuration with its source, as the command line wrote it."""
    mlflow_address = Inside("mlflow_address.json")
    mlflow_run = Inside("mlflow.json")
    """The MLflow run."""
    fetched_from = Inside("fetched.json")
    """The workspace whose samples of a step under way were fetched from a store."""
    copied = Inside("copied.json")
    """Parts of the run that the store at RATCHET_STORE_URL has."""
    seconds = Inside("seconds.json")
    """Wall time of the whole run, for learning curves."""
    origin = Inside("origin.json")
    """The replayed step, in a run that starts with a replay."""
    dataset_fingerprint = Inside("dataset.json")
    """Digest and counts of the rows that the run draws from."""
    layout = Inside("layout.json")
    """The layout that was planned when the run began, with its reasons."""
    forecast = Inside("forecast.json")
    """Seconds and memory that a step was expected to take."""
    steps = Inside("steps")
    adapters = Inside("adapters")
    evaluations = Inside("evaluations")
    export = Inside("export")
    """The exported model of a finished run."""
    report = Inside(REPORT)
    """RunReport of a finished run."""
    prefect_page = Inside(PREFECT_PAGE)

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

    config = Inside("config.json")
    """The step's configuration."""
    began = Inside("began.json")
    """When the latest attempt at the step started, in seconds since the epoch."""
    pass_rates = Inside("pass_rates.jsonl")
    """With a curriculum: the measured pass rates that decided which rows were drawn, a line for each row."""
    prompts = Inside("prompts.jsonl")
    journal = Inside("samples.journal")
    """Finished samples of a rollout that is under way."""
    turns_journal = Inside("turns.journal")
    """Complete turns of episodes, while a rollout of several turns is under way."""
    episodes_journal = Inside("episodes.journal")
    """Its finished episodes."""
    samples = Inside("samples.parquet")
    """All samples of a finished rollout."""
    left_over = Inside("left_over.parquet")
    """Partial answers that the next step resumes."""
    left_over_episodes = Inside("left_over.jsonl")
    """The same of episodes: finished ones, and of others complete turns, calls of tools and snapshots."""
    samples_inputs = Inside("samples.inputs_key.json")
    """The inputs that decided the samples, and the samples' digests."""
    replaced = Inside("replaced.json")
    """Numbers of samples in rollouts that were made again with other inputs, by the digest of their file."""
    scores_journal = Inside("scores.journal")
    """What a reward outside of the flow's process has judged, while a scoring is under way."""
    judgements = Inside("judgements.jsonl")
    """The answers of a model that judged, and the scores read from them."""
    paid = Inside(PAID)
    scored = Inside("scored.parquet")
    assembled = Inside("assembled.parquet")
    """The samples of the batch, with rewards and advantages."""
    batch = Inside("batch.safetensors")
    """The tensors that the trainer reads."""

    draws = Inside("draws.jsonl")
    """With dynamic sampling: the groups of all draws, a line each."""

    def draw(self, number: int) -> Path:
        """The folder of a draw, with prompts, samples and scores of its own."""
        return self.path / "draws" / f"{number:02d}"

    @property
    def train(self) -> TrainFolder:
        return TrainFolder(self.path / "train")

    timings = Inside("measures")
    """Folder: timings and figures, a file for each verb."""
    memory = Inside("memory")
    """Folder: memory in use, a file for each phase."""
    system_metrics = Inside("machine_load.json")
    """Use of GPUs and CPUs over the step."""
    check_costs = Inside("promises.json")
    """Seconds spent on checks, by kind."""
    timeline = Inside(TIMELINE)
    prefect_page = Inside(PREFECT_PAGE)
    replay = Inside("replay.json")
    """In a replayed step: its digests next to those of the original step."""
    bad_answers = Inside("evidence")
    """Folder: bad answers, which failed a check."""
    page = Inside(PAGE)
    """The report for people."""
    report = Inside(REPORT)
    """StepReport."""
    manifest = Inside(MANIFEST)
    """Its existence means that the step is committed."""


@dataclass(frozen=True)
class SummaryFolder:
    """The report of a run, for people."""

    path: Path

    page = Inside(PAGE)
    curves = Inside(CURVES)
    prefect_page = Inside(PREFECT_PAGE)


@dataclass(frozen=True)
class EvaluationFolder:
    """The files of one adapter's evaluation."""

    path: Path

    record = Inside(EVALUATION)
    questions = Inside("prompts.jsonl")
    greedy = Inside("greedy.parquet")
    """Greedy answers."""
    sampled = Inside("sampled.parquet")
    """Sampled answers, for pass@k."""
    inspect = Inside("inspect")
    """Of a task of inspect-ai: its logs, and what its program said."""
    paid = Inside(PAID)
    prefect_page = Inside(PREFECT_PAGE)


@dataclass(frozen=True)
class ExportFolder:
    """The export of a finished run."""

    path: Path

    adapter = Inside("adapter")
    merged = Inside("merged")
