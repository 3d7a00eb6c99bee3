"""A replay starts a new run with a step of another run: what it reuses, what it may change, where its origin is recorded.

A step's chain of tasks is cut before one of them. Results before the cut are taken from the old step, by their digests. The rest is made
again. So the new run contains everything that its steps need, and is independent.
"""

from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from infra.config import HOW_EPISODES_RUN, RunConfig
from infra.config.sections.evaluation import DECIDE_TRAINED
from infra.config.tools.overrides import flattened
from infra.records import AdapterVersion, CarriedOver, EngineRan, File, PromptBatch, Record, Rollouts, ScoredRollouts, TrainBatch
from infra.runs.manifest import Manifest, ReplayedFrom
from infra.store.files import read_record
from infra.store.layout import RunFolder

TaskName = Literal["draw_prompts", "roll_out", "score", "assemble", "train"]
TASKS: tuple[TaskName, ...] = get_args(TaskName)
OWNERS: dict[str, TaskName] = {
    "model": "draw_prompts",
    "seed": "draw_prompts",
    "data": "draw_prompts",
    "engine": "roll_out",
    "sampling": "roll_out",
    "environment": "roll_out",
    "reward": "score",
    "batch": "assemble",
}
"""The first task whose result depends on a section; train for sections that are not named."""
FREE = (
    *("engine.colocation", "engine.start_timeout_s", "engine.request_timeout_s", "engine.max_lora_rank"),
    *(f"environment.{field}" for field in sorted(HOW_EPISODES_RUN)),
)
"""Fields that do not affect samples."""
HELD_BY_ADAPTERS = ("model", "seed", "trainer.lora")
START_FROM = "trainer.lora.start_from"
R = TypeVar("R", bound=Record)


class ReusedRecords(Record):
    """The old step's records of results that are not made again, as records of the new run."""

    prompts: PromptBatch | None = None
    rollouts: Rollouts | None = None
    scored: ScoredRollouts | None = None
    batch: TrainBatch | None = None


class Origin(Record):
    """The content of origin.json, next to config.json of a run that was started by a replay."""

    replayed_from: ReplayedFrom
    adapter: AdapterVersion
    """The adapter from which the run starts, as a record of this run."""
    changed: tuple[str, ...]
    """Changed fields of the configuration that may affect a digest."""
    model_moved: bool = False
    """The same model has another name here. adapter_config.json contains that name, so its digest may differ."""
    digests: dict[str, str]
    """Digests of the old step's outputs."""
    pass_rates: File | None = None
    """With a curriculum: what the old step knew, as a file of this run."""
    engine: EngineRan | None
    """The engine that made the samples, if they are reused."""
    reward_source: str | None
    """The source of the rewards, if they are reused."""


def origin_of(run: str) -> Origin | None:
    """Return the origin of a run. None for a run that was not started by a replay."""
    path = RunFolder.of(run).origin
    cure = "put it back from a copy: without it the run cannot go on"
    return read_record(path, Origin, cure=cure) if path.exists() else None


def tasks_from(first: str) -> tuple[TaskName, ...]:
    """Return the tasks that a replay runs again.

    Raises:
        ValueError: for an unknown name; lists the known ones.
    """
    if first not in TASKS:
        raise ValueError(f"task {first!r} cannot be where a replay begins; known are {', '.join(TASKS)}")
    return TASKS[TASKS.index(first) :]


def check_changes(before: RunConfig, config: RunConfig, first: TaskName, adapter: AdapterVersion) -> list[str]:
    """Return the changed fields that may affect a digest.

    adapter: The adapter from which the step starts.

    Raises:
        ValueError: for a changed field on which a reused result depends.
    """
    was, now = flattened(before.model_dump(mode="json")), flattened(config.model_dump(mode="json"))
    # A model may be in another place. Its digest shows whether it is the same one.
    changed = [name for name in _changed(before, config) if name != "model"]
    moves_rows = _moves_rows(before, config)
    for field in changed:
        change = f"{field} = {now[field]!r} (it was {was.get(field)!r})"
        if (adapter.weights and field.startswith(HELD_BY_ADAPTERS)) or field == START_FROM:
            raise ValueError(f"{change} cannot be: adapter {adapter.version}, from which the step starts, was made with it")
        owner = _owner(field, moves_rows)
        if TASKS.index(owner) < TASKS.index(first):
            raise ValueError(
                f"{change} changes what {owner} made, which a replay from {first} takes over: replay from {owner} to change it"
            )
    return changed


def first_to_run_again(before: RunConfig, config: RunConfig) -> TaskName:
    """Return the first task whose result depends on a field that differs between two runs; the last task if there is none."""
    moves_rows = _moves_rows(before, config)
    return min((_owner(field, moves_rows) for field in _changed(before, config)), key=TASKS.index, default=TASKS[-1])


def _changed(before: RunConfig, config: RunConfig) -> list[str]:
    was, now = flattened(before.model_dump(mode="json")), flattened(config.model_dump(mode="json"))
    return [name for name in sorted(now) if was.get(name) != now[name] and name not in (*FREE, "name")]


def _moves_rows(before: RunConfig, config: RunConfig) -> bool:
    """Whether evaluations ask other rows, which may have been trained on."""
    was, now = before.training, config.training
    return (was.num_held_out, was.evaluated) != (now.num_held_out, now.evaluated)


def _owner(field: str, moves_rows: bool) -> TaskName:
    if moves_rows and field in DECIDE_TRAINED:
        return "draw_prompts"
    return OWNERS.get(field.split(".")[0], TASKS[-1])


def kept_of(manifest: Manifest, first: TaskName, run: str) -> ReusedRecords:
    """Return the records of results before a task, for a new run."""
    receipts = {"prompts": "draw_prompts", "rollouts": "roll_out", "scored": "score", "batch": "assemble"}
    again = tasks_from(first)
    return ReusedRecords(**{name: moved(getattr(manifest, name), run) for name, task in receipts.items() if task not in again})


def moved(record: R, run: str) -> R:
    """Return the record as part of another run: the run's name and the files' paths change, digests and everything else do not."""
    old = f"runs/{record.model_dump()['run']}/"

    def place(value: Any) -> Any:  # Any: JSON
        if not isinstance(value, dict):
            return value
        if value.keys() == File.model_fields.keys():
            return value | {"path": f"runs/{run}/" + value["path"].removeprefix(old)}
        return {name: place(item) for name, item in value.items()}

    return type(record).model_validate(place(record.model_dump()) | {"run": run})


def files_in(*records: Record | None) -> list[File]:
    """Return all files named in records."""
    values = [value for record in records if record for _, value in record]
    within = [value for value in values if isinstance(value, CarriedOver)]
    return [value for value in values if isinstance(value, File)] + (files_in(*within) if within else [])


def place_in(folder: Path, file: File) -> Path:
    """Return the place of a run's file in another folder of that run's layout."""
    return folder.joinpath(*Path(file.path).parts[2:])
