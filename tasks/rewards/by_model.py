"""Rewards that a model gives: `rubric` of each sample, `ruler` of each group. What they need is checked before the run."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from infra.concurrency.deadline import NO_DEADLINE, Deadline
from infra.config import JUDGED_BY_MODEL, JudgeConfig, RewardConfig
from infra.data.prompts import Prompt
from infra.records import PromptBatch, Rollouts
from infra.rewards.judges import rubric, ruler
from infra.rewards.judges.cases import LATE, Ask, Case, JudgeAnswer, JudgeAway, JudgeRequest
from infra.rewards.judges.endpoint import JudgeEndpoint
from infra.rewards.judges.judging import NOT_ASKED, Judging, OnOutcome, WorkName
from infra.rewards.judges.ledger import Ledger, step_work
from infra.rewards.outcome import ALONE, unjudged
from infra.rewards.scores import fields_of
from infra.runs.foreign_adapters import judge_adapter
from infra.settings import settings
from infra.store.files import read_json_lines, verified, write, write_json_lines
from infra.store.layout import StepFolder, Workspace
from infra.store.samples import Sample, groups_of, read_samples

RUBRIC = "rubric"
FIGURE = "judge_"
"""How the figures of a judge begin among those of the scoring."""


NewSamples = tuple[Sequence[Sample], Sequence[Prompt]]
"""Samples, and the prompt of each."""
MAX_AWAY = 3
"""Requests without an answer after which a judge is not asked beside the rollout any more."""


class JudgeGone(RuntimeError):
    """A judge did not answer while the rollout ran."""


class JudgedWork(NamedTuple):
    """What is judged, and where the answers are kept for people."""

    run: str
    name: str
    """`step 3`, or `evaluation 3`."""
    answers: Path
    """A file of JSON lines."""
    ask: Ask | None = None
    """Asks the run's own engine or the judge's server, where that is the judge. None: it has been asked already."""
    base_sha256: str = ""
    """Of the base model, or of the second model, where it is the judge."""
    deadline: Deadline = NO_DEADLINE
    """Of all that is judged. What has no answer then is unjudged."""


def check(config: RewardConfig) -> None:
    """Check the rubric and the key without asking the judge. Raises ValueError, in one line, for a rubric that cannot be used."""
    text = rubric.text_of(config.judge)
    if _uses_rubric(config):
        rubric.check(text)
    key = settings().judge_api_key
    if key is not None and not (key.get_secret_value().isascii() and key.get_secret_value().isprintable()):
        raise ValueError(
            "RATCHET_JUDGE_API_KEY holds characters that no header may have: set the key alone, without a line break"
        )


def check_columns(config: RewardConfig, source: str, columns: Sequence[str]) -> None:
    """Raises ValueError for a column that the rubric uses and the data set lacks."""
    if not _uses_rubric(config):
        return
    if missing := sorted(rubric.check(rubric.text_of(config.judge)) - set(columns)):
        raise ValueError(
            f"reward.judge.rubric uses {{row[{missing[0]}]}}, and data set {source!r} has no such column; it has {', '.join(columns)}"
        )


def _uses_rubric(config: RewardConfig) -> bool:
    return any(function.name == RUBRIC for function in config.called)


def source_digest(config: JudgeConfig) -> str:
    """Digest the rubric, which may be a file, and the adapter that judges."""
    of_rubric = hashlib.sha256(rubric.text_of(config).encode()).hexdigest()
    return f"{of_rubric} {judge_adapter.digest(config)}" if config.adapter else of_rubric


def _own_model(config: JudgeConfig, sha256: str) -> str:
    """Name what judges in the run's own engine or in the judge's server, for the digests of requests."""
    of_adapter = f" adapter {judge_adapter.digest(config)}" if config.adapter else ""
    return f"{config.by} {sha256}{of_adapter}"


def figures_of(config: JudgeConfig, work: JudgedWork) -> dict[str, float]:
    """Return what the judge took for one work, and so far in its run, by the names that the metrics have."""
    with Ledger() as ledger:
        of_work, of_run = ledger.spent(work.run, work.name), ledger.spent(work.run)
    prices = (config.input_price, config.output_price)
    found = {"requests": of_work.requests, "input_tokens": of_work.input_tokens, "output_tokens": of_work.output_tokens}
    found |= {"run_tokens": of_run.tokens}
    costs = {"cost": of_work.cost(*prices), "run_cost": of_run.cost(*prices)} if any(prices) else {}
    limits = {
        "max_run_tokens": (of_run.tokens, config.max_run_tokens),
        "max_run_cost": (of_run.cost(*prices), config.max_run_cost),
    }
    used = [taken / limit for taken, limit in limits.values() if limit]
    return {
        f"{FIGURE}{name}": float(value)
        for name, value in {**found, **costs, **({"budget_used_frac": max(used)} if used else {})}.items()
    }


def keep_paid(path: Path, run: str, work: str) -> None:
    """Write the answers that one work of a run has paid beside its other files, which a store has copies of. No file where there are none."""
    if not Workspace.here().judgements.exists():
        return
    with Ledger() as ledger:
        paid = ledger.paid(run, work)
    if paid:
        write(path, paid)


def judge(
    config: RewardConfig, name: str, samples: Sequence[Sample], prompts: Sequence[Prompt], on_outcome: OnOutcome, work: JudgedWork
) -> None:
    """Have samples judged by the endpoint or the run's own engine. What it has answered before is not asked again.

    prompts: Of each sample.

    Raises:
        RewardFailed: if the budget of the run is spent. Errors of on_outcome are raised too.
    """
    of_judge = config.judge
    is_ours = of_judge.by != "endpoint"
    model = _own_model(of_judge, work.base_sha256) if is_ours else of_judge.model
    ask = work.ask if is_ours else JudgeEndpoint(of_judge, settings().judge_api_key, work.deadline)
    cases = _cases(name, of_judge, samples, prompts)
    if name != RUBRIC:
        for index in sorted(set(range(len(samples))) - {index for case in cases for index in case.indices}):
            on_outcome(index, unjudged(ALONE, "is the only sample of its prompt, and RULER compares the samples of a prompt"))
    with Ledger() as ledger:
        judging = Judging(of_judge, model, cases, ledger, WorkName(work.run, work.name), on_outcome)
        try:
            judging.run(ask, LATE if work.deadline.is_over else NOT_ASKED)
        finally:
            write_json_lines(work.answers, (_shown(row, samples) for row in judging.rows()))


def judge_step(
    config: RewardConfig, rollouts: Rollouts, prompts: PromptBatch, ask: Ask, base_sha256: str, deadline: Deadline
) -> None:
    """Have a step's samples judged by all rewards that a model gives. The answers go into the ledger, where the scoring reads them.

    Raises:
        RewardFailed: as `judge` does.
    """
    samples = read_samples(verified(rollouts.file))
    by_id = {row["prompt_id"]: Prompt(**row) for row in read_json_lines(verified(prompts.file))}
    asked = [by_id[sample.prompt_id] for sample in samples]
    work = JudgedWork(rollouts.run, step_work(rollouts.step), StepFolder.of(rollouts).judgements, ask, base_sha256, deadline)
    for function in (each for each in config.called if each.name in JUDGED_BY_MODEL):
        judge(config, function.name, samples, asked, lambda index, outcome: None, work)


def judge_ahead(config: RewardConfig, name: str, new: Callable[[], NewSamples | None], work: JudgedWork) -> None:
    """Have the endpoint judge samples while the rollout still runs. Its answers go into the ledger, where the scoring finds them.

    new: Returns the samples since the last call, in whole groups, with their prompts. None: the rollout has ended.

    Raises:
        RewardFailed: if the budget of the run is spent, as the scoring will again.
        JudgeGone: if MAX_AWAY requests had no answer. The scoring asks again.
    """
    of_judge, num_away = config.judge, 0
    with Ledger() as ledger:
        name_of_work = WorkName(work.run, work.name)
        judging = Judging(of_judge, of_judge.model, [], ledger, name_of_work, lambda index, outcome: None, is_ahead=True)

        def more() -> list[JudgeRequest] | None:
            found = new()
            return None if found is None else judging.more(_cases(name, of_judge, *found))

        def take(position: int, found: JudgeAnswer | JudgeAway) -> None:
            nonlocal num_away
            judging.take(position, found)
            num_away += isinstance(found, JudgeAway) and found != LATE
            if isinstance(found, JudgeAway) and num_away >= MAX_AWAY:
                raise JudgeGone(f"{num_away} requests to the judge had no answer: {found.message}")

        JudgeEndpoint(of_judge, settings().judge_api_key, work.deadline).follow(more, take)


def _cases(name: str, config: JudgeConfig, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Case]:
    return (_cases_by_rubric if name == RUBRIC else _cases_by_group)(config, samples, prompts)


def _cases_by_rubric(config: JudgeConfig, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Case]:
    template = rubric.text_of(config)
    return [
        rubric.case_of(config, template, index, _fields(sample, prompt, rubric.TAKES))
        for index, (sample, prompt) in enumerate(zip(samples, prompts, strict=True))
    ]


def _cases_by_group(config: JudgeConfig, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Case]:
    """Return a case for each group of two or more."""
    standards, of = rubric.text_of(config), {(each.prompt_id, each.sample_index): n for n, each in enumerate(samples)}
    cases = []
    for group in groups_of(samples):
        if len(group) < 2:
            continue
        indices = [of[each.prompt_id, each.sample_index] for each in group]
        trajectories = [_fields(samples[index], prompts[index], ("messages",))["messages"] for index in indices]
        cases.append(ruler.case_of(indices, trajectories, standards))
    return cases


def _fields(sample: Sample, prompt: Prompt, takes: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(fields_of(sample, prompt, takes, []))
    return found


def _shown(row: dict[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
    """Name the samples of a case as their files do."""
    first, *_ = found = [samples[index] for index in row["indices"]]
    return {"prompt_id": first.prompt_id, "sample_indices": [each.sample_index for each in found], "votes": row["votes"]}
