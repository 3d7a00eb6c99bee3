"""What models that judge samples ask of the other sections. Rules of infra.config.rules."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # RunConfig's own module imports the rules
    from infra.config.sections.run import RunConfig


def sampling_ahead_leaves_the_judge_an_engine(config: "RunConfig") -> None:
    max_staleness = config.trainer.loss.correction.max_staleness
    if max_staleness > 1 and config.reward.is_judged_by_engine:
        raise ValueError(
            f"trainer.loss.correction.max_staleness {max_staleness} with a judge by the run's own engine: it samples for later steps when it would "
            "be asked; set max_staleness to 1, or take a judge of its own (reward.judge.by 'endpoint')"
        )


def ruler_compares_several_samples(config: "RunConfig") -> None:
    if config.reward.compares_groups and config.sampling.group_size < 2:
        raise ValueError(
            f"reward 'ruler' with sampling.group_size {config.sampling.group_size}: it compares the samples of a prompt, take 2 or more"
        )
    if config.reward.compares_groups and config.evaluation.every:
        raise ValueError(
            f"reward 'ruler' with evaluation.every {config.evaluation.every}: an evaluation has one greedy answer to a question, and nothing to "
            "compare it with; set evaluation.every to 0"
        )


def engine_can_judge(config: "RunConfig") -> None:
    if not config.reward.is_judged_by_engine:
        return
    if config.engine.lora_mode == "merged":
        raise ValueError("reward.judge.by 'engine' with engine.lora_mode 'merged': the base model is not served, take 'adapter'")
    answer, context = config.reward.judge.max_output_tokens, config.engine.max_context_tokens
    if answer >= context:
        raise ValueError(
            f"reward.judge.max_output_tokens {answer} leaves no room for a prompt in engine.max_context_tokens {context}: lower it"
        )


def judge_takes_turns_with_the_engine(config: "RunConfig") -> None:
    """A judge with a server of its own has the GPU between a step's only rollout and its training."""
    if not config.reward.has_judge_server:
        return
    engine, max_staleness = config.engine, config.trainer.loss.correction.max_staleness
    refused = {
        f"engine.kind {engine.kind!r}": (engine.kind == "vllm", "its server sleeps by SGLang's protocol; take 'sglang'"),
        f"engine.replicas {engine.replicas or 'auto'}": (engine.replicas != 1, "it takes turns with one server; set it to 1"),
        "engine.colocation 'separate_gpus'": (
            engine.colocation == "separate_gpus",
            "the engine would never make room for it; take 'auto', or a judge that is an endpoint",
        ),
        f"trainer.loss.correction.max_staleness {max_staleness}": (
            max_staleness > 0,
            "the engine would sample for later steps while the judge needs its memory; set it to 0",
        ),
        f"data.max_draws {config.data.max_draws}": (
            config.data.max_draws > 1,
            "each draw would move both models; set it to 1",
        ),
        f"environment {config.environment.label!r}": (
            bool(config.environment.label),
            "episodes bring their own rewards; leave one of them out",
        ),
    }
    for what, (is_refused, why) in refused.items():
        if is_refused:
            raise ValueError(f"{what} with reward.judge.by 'model' is not supported: {why}")
