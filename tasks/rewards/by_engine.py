"""The run's own engine as the judge: the base model, or an adapter that judges, in the same server while it is awake.

It is asked before the engine's memory is released, and its answers go into the ledger; the scoring then reads them there. Its requests
are a rollout of what judges: the engine is checked when that is loaded and once more at the end, and nothing of an engine that answers
wrongly is kept. The next adapter is loaded after training in any case, so the step loads nothing more.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from prefect import task

from infra.concurrency.deadline import NO_DEADLINE, Deadline
from infra.config import EngineConfig, JudgeConfig, RewardConfig
from infra.config.sections.evaluation import EvalSamplingConfig
from infra.data.chat_renderer import ChatRequest
from infra.data.chat_templates import of_model, rendered
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.interface import Engine, RolloutRequest
from infra.engines.sampling import sample_all
from infra.models import base_model
from infra.records import AdapterVersion, PromptBatch, Rollouts
from infra.rewards.judges.cases import LATE, Ask, JudgeAnswer, JudgeAway, JudgeRequest, OnAnswer
from infra.runs.foreign_adapters import judge_adapter
from infra.store.samples import Sample
from tasks.rewards import by_model
from tasks.support.caching import NO_CACHE
from tasks.support.retries import BACKOFF, MAX_RETRIES, worth_another_try

log = logging.getLogger(__name__)

NUM_AT_A_TIME = 256
"""Requests of one rollout: a kill costs the judgements of one."""


def base_of(adapter: AdapterVersion) -> AdapterVersion:
    """Return the base model of an adapter, as version 0."""
    kept = {name: getattr(adapter, name) for name in ("run", "base", "rank", "alpha", "target_modules", "seed")}
    return AdapterVersion(version=0, **kept)


def judge_of(adapter: AdapterVersion, judge: JudgeConfig) -> AdapterVersion:
    """Return what the engine serves to judge: the base model, or the adapter that judges, prepared.

    Raises:
        ValueError: for an adapter that an engine for this run's adapters cannot serve.
    """
    if not judge.adapter:
        return base_of(adapter)
    judging = judge_adapter.prepared(judge, adapter.base)
    judge_adapter.check_targets(judge, judging.target_modules, adapter.target_modules)
    return judging


def asker(
    engine: EngineConfig,
    adapter: AdapterVersion,
    judge: JudgeConfig,
    deadline: Deadline = NO_DEADLINE,
    opened: Callable[[EngineConfig, AdapterVersion], Engine] | None = None,
    limited_by: str = "engine.max_context_tokens",
) -> Ask:
    """Return what sends requests to the engine, which serves the judge afterwards: the base model, or reward.judge.adapter.

    adapter: That of the run: the engine is launched for its like.
    deadline: After it nothing is sent, and what is under way is aborted: it is late.
    opened: Gives the engine; None: open_engine. limited_by: The field that limits a request.
    """

    def ask(requests: Sequence[JudgeRequest], on_answer: OnAnswer) -> None:
        base = base_of(adapter)
        folder = base_model.locate(base.base.id)
        asked = _prompts_of(requests, base)
        limit = engine.max_context_tokens - judge.max_output_tokens
        fitting = [prompt for prompt in asked if len(prompt.prompt_tokens) <= limit]
        for prompt in asked:
            if len(prompt.prompt_tokens) > limit:
                on_answer(prompt.prompt_id, JudgeAway(_too_long(len(prompt.prompt_tokens), engine, judge, limited_by)))
        judging = judge_of(adapter, judge)
        sampling = EvalSamplingConfig(group_size=1, temperature=judge.temperature, max_output_tokens=judge.max_output_tokens)
        for begin in range(0, len(fitting), NUM_AT_A_TIME):
            some = fitting[begin : begin + NUM_AT_A_TIME]
            # It is launched for the base model: an adapter that judges may be on fewer layers, which is no reason for another launch.
            samples = _sampled(
                partial(opened or open_engine, engine, base), RolloutRequest(some, sampling, judging, deadline=deadline)
            )
            texts = base_model.texts_of(folder, [sample.output_tokens for sample in samples])
            for sample, text in zip(samples, texts, strict=True):
                sizes = (len(sample.prompt_tokens), len(sample.output_tokens))
                on_answer(sample.prompt_id, JudgeAnswer(text, sample.finish_reason, *sizes))
            for number in {prompt.prompt_id for prompt in some} - {sample.prompt_id for sample in samples}:
                on_answer(number, LATE)

    return ask


def _sampled(opened: Callable[[], Engine], request: RolloutRequest) -> list[Sample]:
    """Return the samples that are complete before the deadline. Nothing is loaded when that is over."""
    if request.deadline.is_over:
        return []
    return sample_all(opened(), request)[0]


def _prompts_of(requests: Sequence[JudgeRequest], base: AdapterVersion) -> list[Prompt]:
    """Render requests in the model's chat template. The seed is a part of the request's digest, so that votes differ."""
    folder = base_model.locate(base.base.id)
    tokenizer = base_model.tokenizer(folder)
    chats = [ChatRequest(messages=list(request.messages), tools=None, row={}) for request in requests]
    texts = rendered(of_model(folder, tokenizer), tokenizer, chats)
    found = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [
        Prompt(number, number, "", "", list(map(int, tokens)), int(request.key[:12], 16))
        for number, (request, tokens) in enumerate(zip(requests, found, strict=True))
    ]


def _too_long(num_tokens: int, engine: EngineConfig, judge: JudgeConfig, limited_by: str) -> str:
    return (
        f"its prompt has {num_tokens} tokens, which with reward.judge.max_output_tokens {judge.max_output_tokens} are more than "
        f"{limited_by} {engine.max_context_tokens}"
    )


@task(cache_policy=NO_CACHE, retries=MAX_RETRIES, retry_delay_seconds=BACKOFF, retry_condition_fn=worth_another_try)
def ask_engine(
    engine: EngineConfig,
    reward: RewardConfig,
    rollouts: Rollouts,
    prompts: PromptBatch,
    adapter: AdapterVersion,
    deadline: Deadline,
) -> None:
    """Rollouts -> answers in the ledger. What it holds already is not asked again."""
    ask = asker(engine, adapter, reward.judge, deadline)
    by_model.judge_step(reward, rollouts, prompts, ask, adapter.base.sha256, deadline)
