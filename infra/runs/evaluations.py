"""The evaluations of a run: where they lie, and which adapter is best.

runs/<run>/evaluations/000005-<adapter>-<evaluation>/{evaluation.json, prompts.jsonl, greedy.parquet, sampled.parquet}
                                       <set>-<evaluation> where the set has a name
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from infra.config import (
    HOW_EPISODES_RUN,
    HOW_JUDGE_SERVERS_RUN,
    HOW_JUDGES_ARE_ASKED,
    HOW_REWARD_MODELS_RUN,
    HOW_REWARDS_RUN,
    EvalConfig,
    EvaluationConfig,
    RunConfig,
)
from infra.eval_records import Evaluation
from infra.records import AdapterVersion
from infra.store.files import id_of, new_id, read_record, write_json
from infra.store.layout import EVALUATION, EvaluationFolder, RunFolder

ADDED = (
    *("messages_column", "tools_column", "assistant_turn", "template", "chat_template_kwargs"),
    *("revision", "filter", "hold_out", "sources"),
)
"""Fields of the data that are in an evaluation's digest only where they are set: figures stay comparable when a field is added. For the same
reason a field that was renamed keeps its first name there."""


def eval_digest(eval_config: EvalConfig) -> str:
    """Digest an evaluation's configuration without the fields that do not affect its figures."""
    if eval_config.inspect:
        asked = eval_config.model_dump_json(exclude=dict.fromkeys(("data", "reward", "name", "inspect_timeout_s"), True))
        return hashlib.sha256(f"{asked} {eval_config.data.num_prompts}".encode()).hexdigest()[:16]
    excluded = {"partial_rollouts", "allow_repeats", "evaluated", "max_draws", "curriculum", "pass_rate_between"}
    if eval_config.data.part == "all":
        excluded |= {"part", "num_held_out", "held_out_seed"}
    fields = type(eval_config.data).model_fields
    excluded |= {name for name in ADDED if getattr(eval_config.data, name) == fields[name].default}
    reward = eval_config.reward
    left_out = HOW_REWARDS_RUN | (set() if reward.functions else {"functions"})
    of_reward: dict[str, Any] = dict.fromkeys(left_out, True)
    of_judge: dict[str, Any] = dict.fromkeys(HOW_JUDGES_ARE_ASKED | (set() if reward.judge.adapter else {"adapter"}), True)
    of_judge |= {"server": HOW_JUDGE_SERVERS_RUN if reward.has_judge_server else True}
    of_reward |= {"judge": of_judge if reward.is_judged_by_model else True}
    of_reward |= {"model": HOW_REWARD_MODELS_RUN if reward.uses_reward_model else True}
    unset = {
        name
        for name in ("has_greedy", "top_p", "environment", "inspect")
        if getattr(eval_config, name) == EvalConfig.model_fields[name].default
    }
    # Any: pydantic's IncEx
    exclude: dict[str, Any] = {"data": excluded, "reward": of_reward, "environment": HOW_EPISODES_RUN}
    exclude |= dict.fromkeys(unset | {"name", "inspect_timeout_s"}, True)
    measured = eval_config.model_dump_json(exclude=exclude)
    return hashlib.sha256(measured.replace('"too_long":', '"long_prompts":', 1).encode()).hexdigest()[:16]


def folder_of(adapter: AdapterVersion, eval_config: EvalConfig) -> Path:
    """Return the folder of one adapter and one evaluation."""
    of_set = f"{eval_config.name}-" if eval_config.name else ""
    name = f"{adapter.version:06d}-{adapter.sha256[:12]}-{of_set}{eval_digest(eval_config)[:8]}"
    return RunFolder.of(adapter.run).evaluations / name


def id_of_folder(adapter: AdapterVersion, eval_config: EvalConfig) -> str:
    """Return the id of the folder, which is made if there is none: one that was removed has another id then, and no result of it counts any more."""
    folder = folder_of(adapter, eval_config)
    if not id_of(folder):
        new_id(folder)
    return id_of(folder)


class Written(BaseModel):
    """The fields of evaluation.json that are read back."""

    record: Evaluation
    sha256: str
    """Digest of the record and its folder's name. It detects figures that were changed or copied from another adapter's evaluation."""


def write(folder: Path, record: Evaluation, **about: object) -> Path:
    """Write evaluation.json.

    about: Further metadata for readers; the program uses none of it to decide.
    """
    return write_json(
        EvaluationFolder(folder).record, {"record": record.model_dump(mode="json"), "sha256": _digest(folder, record), **about}
    )


def _read(path: Path) -> Evaluation:
    cure = "remove its folder, and the evaluation is made again"
    found = read_record(path, Written, cure=cure)
    if found.sha256 != _digest(path.parent, found.record):
        raise ValueError(
            f"{path} is not what was written there: its figures were changed or belong to another evaluation; {cure}"
        )
    return found.record


def _digest(folder: Path, record: Evaluation) -> str:
    later = {name for name in ("task_metrics", "reward_source") if not getattr(record, name)}  # as it was before there were any
    content = record.model_dump_json(exclude=later)
    return hashlib.sha256(f"{folder.name} {content}".encode()).hexdigest()


def of_run(run: str, eval_config: EvalConfig | None = None) -> list[Evaluation]:
    """Read a run's evaluations, sorted by version: those of one set and configuration, or all.

    Raises:
        ValueError: for one that cannot be read or was changed; names the file.
    """
    folders = sorted(RunFolder.of(run).evaluations.glob(f"*/{EVALUATION}"))
    found = [_read(path) for path in folders]
    return [each for each in found if eval_config is None or is_of(each, eval_config)]


def is_of(made: Evaluation, eval_config: EvalConfig) -> bool:
    return (made.set_name, made.eval_digest) == (eval_config.name, eval_digest(eval_config))


def of_other_sets(config: RunConfig) -> list[Evaluation]:
    """Read the run's own evaluations of the sets that do not decide which adapter is the best, set by set."""
    others = [each for name, each in config.eval_configs.items() if name != config.evaluation.deciding[0]]
    return [made for each in others for made in of_run(config.name, each)]


def best_metric(config: EvaluationConfig, evaluations: Sequence[Evaluation]) -> str:
    """Name the metric that decides which of these evaluations is the best, as in `Evaluation.metrics`."""
    return f"{evaluations[0].prefix if evaluations else 'eval/'}{_best_figure(config, evaluations)}"


def _best_figure(config: EvaluationConfig, evaluations: Sequence[Evaluation]) -> str:
    name, metric = config.deciding
    if metric != "auto":
        return metric
    if any(each.mean_reward is None for each in evaluations):
        return "pass_at_1"
    (pass_reward,) = (asked.pass_reward or 0.0 for asked in config.asked if asked.name == name)
    is_binary = all(each.is_binary for each in evaluations) and 0 < pass_reward <= 1
    return "pass_at_1" if is_binary else "mean_reward"


def scores_of(config: EvaluationConfig, evaluations: Sequence[Evaluation]) -> list[float]:
    """The value of the best metric in each evaluation, its negative where the lowest is the best; one that lacks it, or has too many unjudged
    answers, counts as minus infinity."""
    figure = _best_figure(config, eligible(evaluations) or evaluations)
    sign = 1.0 if config.best_is == "highest" else -1.0
    return [sign * each.figures[figure] if each.is_eligible and figure in each.figures else -math.inf for each in evaluations]


def eligible(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return those of which few enough answers are unjudged, and whose rewards are of the source that the latest version's are of."""
    return [each for each in evaluations if each.is_eligible and each.reward_source in ("", evaluations[-1].reward_source)]


def best_of(config: EvaluationConfig, evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Choose the eligible evaluation with the highest score; of equal ones the earliest."""
    evaluations = eligible(evaluations)
    scored = zip(scores_of(config, evaluations), evaluations, strict=True)
    return max(scored, key=lambda pair: pair[0], default=(0.0, None))[1]


def best_steps(config: EvaluationConfig, evaluations: Sequence[Evaluation]) -> set[int]:
    """Return the versions that are the best by each state of the reward's source: a package that was upgraded, or a change that is taken back, makes
    no earlier best adapter one to be removed."""
    sources = {each.reward_source for each in evaluations}
    found = [best_of(config, [each for each in evaluations if each.reward_source == source]) for source in sources]
    return {best.step for best in (*found, best_of(config, evaluations)) if best}


def unreached_threshold(config: EvaluationConfig, evaluations: Sequence[Evaluation]) -> str | None:
    """Say that no answer of any evaluation had `pass_reward`, with the numbers; None where one had, or where older records do not tell."""
    highest = [each.max_reward for each in evaluations if each.max_reward is not None]
    means = [each.mean_reward for each in evaluations if each.mean_reward is not None]
    (asked,) = (each for each in config.asked if each.name == config.deciding[0])
    pass_reward = asked.pass_reward or 0.0
    if not highest or len(highest) < len(evaluations) or max(highest) >= pass_reward:
        return None
    return (
        f"no answer of {len(highest)} evaluations reached evaluation.pass_reward {pass_reward:g}, so pass@1 and pass@k are 0: the highest "
        f"reward was {max(highest):.4g}, the mean reward {means[0]:.4g} at first and {means[-1]:.4g} at last. If these rewards are as they should "
        "be, set evaluation.pass_reward to one that a right answer gets"
    )


def due_sets(config: EvaluationConfig, version: int, num_steps: int) -> list[str]:
    """Return the names of the sets to evaluate this version on: before training, every `every` steps, and at the end."""
    if not config.every:
        return []
    return [asked.name for asked in config.asked if version % (asked.every or config.every) == 0 or version == num_steps]


def is_due(config: EvaluationConfig, version: int, num_steps: int) -> bool:
    """Whether to evaluate this version on any set."""
    return bool(due_sets(config, version, num_steps))


def has_stalled(config: EvaluationConfig, evaluations: Sequence[Evaluation]) -> bool:
    """Whether none of the latest `patience` eligible evaluations was better than the best before them."""
    evaluations = eligible(evaluations)
    if config.patience is None or len(evaluations) <= config.patience:
        return False
    scores = scores_of(config, evaluations)
    return max(scores[-config.patience :]) <= max(scores[: -config.patience]) + config.min_delta


def stalled(config: RunConfig, version: int) -> bool:
    found = [each for each in of_run(config.name, config.eval_config) if each.step <= version]
    return has_stalled(config.evaluation, found)
