"""Evaluate an adapter on held-out questions: pass@1 of greedy answers, pass@k of sampled ones."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from prefect import task

from infra.config import DataConfig, EngineConfig, EvalConfig, SamplingConfig
from infra.data import dataset, prompts
from infra.data.prompts import Prompt, num_overlapping
from infra.engines import open_engine
from infra.engines.interface import RolloutRequest, SampleSink
from infra.engines.journal import Journal
from infra.engines.sampling import inputs_key, sample_all
from infra.models import base_model
from infra.progress.brief import brief
from infra.records import AdapterVersion, Evaluation
from infra.reporting import brief_lines
from infra.runs import evaluations
from infra.store.files import record_of, write_json_lines
from infra.store.layout import EvaluationFolder
from infra.store.samples import Sample, groups_of, read_samples, write_samples
from tasks import rewards
from tasks.rewards.apply import rewarded
from tasks.support.caching import cached
from tasks.support.retries import BACKOFF, MAX_RETRIES, worth_another_try


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples passes, from num_samples of which num_passed passed: Chen et al. 2021,
    arXiv 2107.03374, equation 1."""
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def share_passed(samples: Sequence[Sample], pass_reward: float) -> float:
    return fmean(float(_passes(sample, pass_reward)) for sample in samples)


def mean_pass_at_k(samples: Sequence[Sample], k: int, pass_reward: float) -> float:
    """Mean of pass@k over questions."""
    return fmean(pass_at_k(len(group), sum(_passes(sample, pass_reward) for sample in group), k) for group in groups_of(samples))


def _passes(sample: Sample, pass_reward: float) -> bool:
    return (sample.reward or 0.0) >= pass_reward


def check_questions(eval_config: EvalConfig, run: str) -> None:
    """Raises ValueError if earlier evaluations of the run had other questions: their figures cannot be compared."""
    now = dataset.fingerprint(eval_config.data)
    for earlier in evaluations.of_run(run, eval_config):
        if earlier.dataset_fingerprint not in ("", now):
            raise ValueError(
                f"the held-out data set {eval_config.data.source!r} (split {eval_config.data.split!r}) has changed since "
                f"adapter {earlier.step} of run {run!r} was evaluated: its digest is {now}, recorded was "
                f"{earlier.dataset_fingerprint}. Put it back, or make it another evaluation (another evaluation.num_prompts, say)"
            )


def _answered(
    engine: EngineConfig, sampling: SamplingConfig, asked: list[Prompt], adapter: AdapterVersion, path: Path
) -> list[Sample]:
    """Return the answers to the questions, in the folder of path. Answers recovered from the journal of an earlier attempt are not generated
    again."""
    fence = inputs_key(engine, sampling, record_of(EvaluationFolder(path.parent).questions), adapter)
    with Journal(_journal(path), fence) as journal:
        return sample_all(open_engine(engine, adapter), RolloutRequest(asked, sampling, adapter), SampleSink(journal))[0]


def _journal(path: Path) -> Path:
    return path.with_suffix(".journal")


@task(
    cache_policy=cached(
        also=lambda inputs: (
            rewards.source_digest(inputs["eval_config"].reward.name) + dataset.fingerprint(inputs["eval_config"].data)
        )
    ),
    retries=MAX_RETRIES,
    retry_delay_seconds=BACKOFF,
    retry_condition_fn=worth_another_try,
)
def evaluate_adapter(engine: EngineConfig, eval_config: EvalConfig, training: DataConfig, adapter: AdapterVersion) -> Evaluation:
    """AdapterVersion -> Evaluation.

    training: The training data, which should not contain the held-out questions.
    """
    begun = time.monotonic()
    check_questions(eval_config, adapter.run)
    asked = prompts.held_out(eval_config.data, base_model.locate(adapter.base.id))
    folder = EvaluationFolder(evaluations.folder_of(adapter, eval_config))
    write_json_lines(folder.questions, (prompt._asdict() for prompt in asked))
    wanted = {folder.greedy: eval_config.greedy} | ({folder.sampled: eval_config.sampled} if eval_config.sampled else {})
    for path, sampling in wanted.items():
        write_samples(path, rewarded(_answered(engine, sampling, asked, adapter, path), asked, eval_config.reward.name))
    greedy, sampled = read_samples(folder.greedy), read_samples(folder.sampled) if eval_config.sampled else []
    made = Evaluation(
        run=adapter.run,
        step=adapter.version,
        adapter_sha256=adapter.sha256,
        eval_digest=evaluations.eval_digest(eval_config),
        dataset_fingerprint=dataset.fingerprint(eval_config.data),
        file=record_of(folder.greedy),
        num_prompts=len(asked),
        num_overlapping=num_overlapping(asked, eval_config.data, training),
        pass_at_1=share_passed(greedy, eval_config.pass_reward),
        pass_at_k={str(k): mean_pass_at_k(sampled, k, eval_config.pass_reward) for k in eval_config.pass_at_k},
        truncated_frac=fmean(float(sample.finish_reason == "length") for sample in greedy),
        mean_reward=fmean(sample.reward or 0.0 for sample in greedy),
        max_reward=max(sample.reward or 0.0 for sample in (*greedy, *sampled)),
        mean_output_tokens=fmean(len(sample.output_tokens) for sample in greedy),
        is_binary=all(sample.reward in (0.0, 1.0) for sample in (*greedy, *sampled)),
    )
    before = [each for each in evaluations.of_run(adapter.run, eval_config) if each.step < adapter.version]
    seconds = time.monotonic() - begun
    evaluations.write(folder.path, made, eval_config=eval_config.model_dump(mode="json"), at=time.time(), seconds=seconds)
    for path in wanted:
        _journal(path).unlink(missing_ok=True)
    brief.info("%s", brief_lines.evaluation_line(made, before[-1] if before else None, seconds))
    return made
