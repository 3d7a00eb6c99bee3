"""Rewards by a reward model: what it gets of samples, and what its scores are kept for."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import orjson

from infra.concurrency.deadline import Deadline
from infra.config import REWARD_MODEL, RewardConfig
from infra.data.prompts import Prompt
from infra.engines.interface import Engine
from infra.rewards.models import batches, checks, scorer, scoring
from infra.rewards.models.scorer import ScorerLost
from infra.rewards.outcome import Outcome
from infra.rewards.scores import ScoreJournal, fields_of, key_of
from infra.store import code_digest
from infra.store.samples import Sample
from infra.telemetry import program_versions

log = logging.getLogger(__name__)

TAKES = ("messages",)


def check(config: RewardConfig) -> None:
    """Check the model's folder without loading it. Raises ValueError, in one line, for a model that cannot score."""
    checks.check(config.model)


def source_digest(config: RewardConfig) -> str:
    """Digest what decides a score besides the section: the model's files, and the program that no task imports."""
    return f"{checks.digest(config.model)} {code_digest.digest('infra.rewards.models')}"


def identity(config: RewardConfig) -> dict[str, str]:
    """Return what the scores in a journal are of, besides the model's digest: one scoring never mixes those of two versions of torch. Empty where
    no reward model scores."""
    if not config.uses_reward_model:
        return {}
    versions = program_versions.key_of(program_versions.of_trainer())  # it runs in the trainer's environment
    return {"model": config.model.model_dump_json(exclude={"load_timeout_s"}), "versions": versions}


def takes_gpu(config: RewardConfig) -> bool:
    """Whether a reward model needs the GPU's memory while it scores."""
    return config.uses_reward_model and scorer.device_of(config.model) == "cuda"


def make_room(config: RewardConfig, engine: Callable[[], Engine]) -> None:
    """Have the engine release its memory, if a reward model needs the GPU. It is woken again by what samples next."""
    if takes_gpu(config):
        engine().release_memory()


@contextmanager
def loading(config: RewardConfig) -> Iterator[None]:
    """Have the reward model's program read the model into host memory while the rollout of the block runs. It takes no memory of a GPU until
    samples are scored. One that was not needed is ended where it would stay on a GPU afterwards."""
    if not config.uses_reward_model:
        yield
        return
    try:
        scorer.begun(config)
    except ScorerLost as error:
        log.warning("the reward model's program could not be started beside the rollout: %s; the scoring tries again", error)
    try:
        yield
    finally:
        scorer.sleep(config.model)


def call(
    config: RewardConfig,
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    take: Callable[[int, Outcome], None],
    journal: ScoreJournal,
    deadline: Deadline,
) -> None:
    """Have samples scored. What the journal holds is taken from there.

    prompts: Of each sample.
    deadline: When it is over, what has no score is unjudged.
    """
    fields = [fields_of(sample, prompt, TAKES, []) for sample, prompt in zip(samples, prompts, strict=True)]
    keys = [key_of(REWARD_MODEL, sample, each) for sample, each in zip(samples, fields, strict=True)]
    known = {index: journal.outcomes[key] for index, key in enumerate(keys) if key in journal.outcomes}
    for index, outcome in known.items():
        take(index, outcome)
    if len(known) == len(samples):
        scorer.sleep(config.model)
        return

    def note(index: int, outcome: Outcome) -> None:
        journal.add(keys[index], outcome)
        take(index, outcome)

    conversations = [orjson.loads(each)["messages"] for each in fields]
    rows = batches.tokens_of(checks.folder_of(config.model), conversations)
    scoring.judge(config, rows, known, note, deadline)
