"""Rules between sections of a RunConfig: one function a rule, run in the order of RULES whenever a configuration is made.

A rule of one section alone stands in that section's module. Each rule raises ValueError with the fields, their values and what to do.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from infra.config.judges import (
    engine_can_judge,
    judge_takes_turns_with_the_engine,
    ruler_compares_several_samples,
    sampling_ahead_leaves_the_judge_an_engine,
)
from infra.config.mixtures import experts_can_be_shared, routing_replay_is_possible
from infra.config.players import environment_fields_have_an_effect, episodes_fit_a_microbatch, tasksets_play_their_own_tasks
from infra.config.sections import evaluation
from infra.config.sections.engine import SLOWEST_TOKENS_PER_S

if TYPE_CHECKING:  # RunConfig's own module imports this one
    from infra.config.sections.run import RunConfig


def groups_can_be_compared(config: "RunConfig") -> None:
    size, advantage = config.sampling.group_size, config.batch.advantage
    if size < 2 and advantage != "reinforce_pp":
        raise ValueError(
            f"sampling.group_size {size} with advantage {advantage!r}: a group needs 2 samples "
            "or more, one alone has nothing to be compared with"
        )


def zero_std_groups_need_two_samples(config: "RunConfig") -> None:
    size, max_draws = config.sampling.group_size, config.data.max_draws
    drops = {"batch.drop_zero_std_groups": config.batch.drop_zero_std_groups, f"data.max_draws {max_draws}": max_draws > 1}
    for field, is_set in drops.items():
        if size < 2 and is_set:
            raise ValueError(f"sampling.group_size {size} with {field}: a group of one is always flat, take 2 or more")


def enough_prompts_are_drawn(config: "RunConfig") -> None:
    max_groups, num_prompts = config.batch.max_groups, config.data.num_prompts
    if max_groups is not None and max_groups > num_prompts:
        raise ValueError(f"batch.max_groups {max_groups} is above data.num_prompts {num_prompts}: draw as many or more")


def minibatches_have_groups(config: "RunConfig") -> None:
    num_minibatches, num_prompts = config.trainer.num_minibatches, config.data.num_prompts
    if num_minibatches > num_prompts:
        raise ValueError(
            f"trainer.num_minibatches {num_minibatches} is above the number of groups, data.num_prompts {num_prompts}"
        )


def minibatches_have_groups_of_the_batch(config: "RunConfig") -> None:
    num_minibatches, max_groups = config.trainer.num_minibatches, config.batch.max_groups
    if max_groups is not None and num_minibatches > max_groups:
        raise ValueError(f"trainer.num_minibatches {num_minibatches} is above batch.max_groups {max_groups}")


def overlong_penalty_is_within_reach(config: "RunConfig") -> None:
    longest, sampled, turns = (
        config.batch.overlong.max_output_tokens,
        config.sampling.max_output_tokens,
        config.environment.max_turns,
    )
    times = f" x environment.max_turns {turns}" if config.environment.label else ""
    if longest is not None and longest > sampled * (turns if times else 1):
        raise ValueError(
            f"batch.overlong.max_output_tokens {longest} is above sampling.max_output_tokens {sampled}{times}: no sample is that long"
        )


def correction_fields_have_an_effect(config: "RunConfig") -> None:
    correction = config.trainer.loss.correction
    for field in ("level", "cap", "floor") if correction.kind == "none" else ():
        value, default = getattr(correction, field), type(correction).model_fields[field].default
        if value != default:
            raise ValueError(
                f"trainer.loss.correction.{field} {value} with kind 'none': nothing is corrected, set mode to 'decoupled' and kind to 'tis', 'mis' "
                f"or 'icepop', or leave {field} at {default}"
            )


def oversampling_is_not_deterministic(config: "RunConfig") -> None:
    if config.data.num_oversampled_prompts and config.engine.deterministic:
        raise ValueError(
            f"data.num_oversampled_prompts {config.data.num_oversampled_prompts} with engine.deterministic: which groups are whole first is a matter "
            "of timing, so no rollout of it can be made again; set engine.deterministic to false (a replay takes the samples over)"
        )


def partial_rollouts_need_oversampling(config: "RunConfig") -> None:
    data = config.data
    if data.partial_rollouts and not 0 < data.num_oversampled_prompts <= data.num_prompts:
        raise ValueError(
            f"data.partial_rollouts with data.num_oversampled_prompts {data.num_oversampled_prompts}: these groups are aborted in each step and have "
            f"to become whole in the next, take 1 to data.num_prompts {data.num_prompts}"
        )


def partial_rollouts_need_a_correction(config: "RunConfig") -> None:
    if config.data.partial_rollouts and config.trainer.loss.correction.kind == "none":
        raise ValueError(
            "data.partial_rollouts with trainer.loss.correction.kind 'none': tokens of an older adapter need a correction, set mode to "
            "'decoupled' and kind to 'tis', 'mis' or 'icepop'"
        )


def partial_rollouts_are_one_step_old(config: "RunConfig") -> None:
    max_staleness = config.trainer.loss.correction.max_staleness
    if config.data.partial_rollouts and max_staleness:
        raise ValueError(
            f"data.partial_rollouts with trainer.loss.correction.max_staleness {max_staleness}: what goes on would be {max_staleness + 1} steps old, "
            "take one of the two"
        )


def partial_rollouts_need_sglang(config: "RunConfig") -> None:
    if (
        config.data.partial_rollouts and config.engine.kind == "vllm" and not config.environment.label
    ):  # turns are carried over whole
        raise ValueError(
            "data.partial_rollouts with engine.kind 'vllm': it gives nothing of an answer that is aborted; take 'sglang'"
        )


def in_flight_updates_are_of_sglang(config: "RunConfig") -> None:
    if not config.trainer.loss.correction.in_flight_updates:
        return
    field, num = "trainer.loss.correction.in_flight_updates true", config.data.num_oversampled_prompts
    if config.engine.kind == "vllm":
        raise ValueError(f"{field} with engine.kind 'vllm': it gives nothing of an answer that is aborted; take 'sglang'")
    if num:
        raise ValueError(
            f"{field} with data.num_oversampled_prompts {num}: a prompt that is left out would have cost both adapters; set it to 0"
        )


def dynamic_sampling_is_of_one_step(config: "RunConfig") -> None:
    data, max_staleness = config.data, config.trainer.loss.correction.max_staleness
    if data.max_draws > 1 and (data.partial_rollouts or max_staleness):
        other = "data.partial_rollouts" if data.partial_rollouts else f"trainer.loss.correction.max_staleness {max_staleness}"
        raise ValueError(
            f"data.max_draws {data.max_draws} with {other}: which prompts the next step samples is known when this step's draws are scored, take one "
            "of the two"
        )


def curriculum_knows_the_step_before(config: "RunConfig") -> None:
    kind, max_staleness = config.data.curriculum, config.trainer.loss.correction.max_staleness
    if kind != "none" and max_staleness:
        raise ValueError(
            f"data.curriculum {kind!r} with trainer.loss.correction.max_staleness {max_staleness}: which rows a step draws is known when the step "
            "before is scored, take one of the two"
        )


def longest_answer_fits_the_request_timeout(config: "RunConfig") -> None:
    lengths = {"sampling.max_output_tokens": config.sampling.max_output_tokens}
    if config.evaluation.every:
        lengths |= {
            f"{evaluation.place_of(asked.name)}max_output_tokens": asked.max_output_tokens or 0
            for asked in config.evaluation.asked
        }
    field, longest = max(lengths.items(), key=lambda length: length[1])
    if config.engine.request_timeout_s < (least := longest / SLOWEST_TOKENS_PER_S):
        raise ValueError(
            f"engine.request_timeout_s {config.engine.request_timeout_s:g} with {field} {longest}: at {SLOWEST_TOKENS_PER_S:g} tokens a second "
            f"one answer takes {least:g} s; set it to that or more"
        )


def off_policy_adapter_is_retained(config: "RunConfig") -> None:
    retention, max_staleness = config.retention, config.trainer.loss.correction.max_staleness
    if retention.keep_last is not None and retention.keep_last <= max_staleness and retention.of_others == "nothing":
        raise ValueError(
            f"retention.keep_last {retention.keep_last} with of_others 'nothing' removes the adapter that trainer.loss.correction.max_staleness "
            f"{max_staleness} still samples from: keep {max_staleness + 1}, or of_others 'adapter'"
        )


def truncation_is_not_rewarded(config: "RunConfig") -> None:
    kl = config.trainer.loss.kl
    if config.batch.mask_truncated and kl.where == "reward" and kl.coefficient:
        raise ValueError(
            f"batch.mask_truncated with trainer.loss.kl.where 'reward' (coefficient {kl.coefficient:g}): a sample without loss tokens pays no "
            "KL, and its reward counts in its group all the same, so that being cut off would be rewarded; take kl.where 'loss', or leave one out"
        )


def turns_pay_no_kl(config: "RunConfig") -> None:
    kl = config.trainer.loss.kl
    if config.batch.advantage_level == "turn" and kl.where == "reward" and kl.coefficient:
        raise ValueError(
            f"batch.advantage_level 'turn' with trainer.loss.kl.where 'reward' (coefficient {kl.coefficient:g}): the penalty is one number for an "
            "episode, no turn's; take kl.where 'loss', or advantage_level 'episode'"
        )


def exported_adapter_is_retained(config: "RunConfig") -> None:
    export, retention = config.export, config.retention
    exports_best = export.what != "nothing" and export.which == "best" and config.evaluation.every
    if exports_best and retention.keep_last and not retention.keep_best and retention.of_others == "nothing":
        raise ValueError(
            "export.which 'best' with retention.keep_best false and of_others 'nothing': the best adapter may be gone when the run ends; "
            "keep it, or export the latest"
        )


def sequences_fit_the_context(config: "RunConfig") -> None:
    prompt, output, context = config.data.max_prompt_tokens, config.sampling.max_output_tokens, config.engine.max_context_tokens
    if prompt + output > context:
        raise ValueError(
            f"data.max_prompt_tokens {prompt} + sampling.max_output_tokens {output} = {prompt + output} is more than "
            f"engine.max_context_tokens {context}"
        )


def evaluations_fit_the_context(config: "RunConfig") -> None:
    context, found = config.engine.max_context_tokens, config.eval_configs  # which refuses data or a reward that does not fit
    for asked in (each for each in config.evaluation.asked if not each.inspect):  # a task's questions have no limit of ours
        prompt = found[asked.name].data.max_prompt_tokens
        if asked.max_output_tokens is None and prompt == config.data.max_prompt_tokens:
            continue  # as in training
        output = asked.max_output_tokens or config.sampling.max_output_tokens
        if prompt + output > context:
            raise ValueError(
                f"data.max_prompt_tokens {prompt} + {evaluation.place_of(asked.name)}max_output_tokens {output} = {prompt + output} is more than "
                f"engine.max_context_tokens {context}"
            )


def sequences_fit_a_microbatch(config: "RunConfig") -> None:
    longest, most = config.data.max_prompt_tokens + config.sampling.max_output_tokens, config.trainer.max_tokens_per_microbatch
    if most is not None and longest > most:
        raise ValueError(
            f"a sequence may have {longest} tokens (data.max_prompt_tokens + sampling.max_output_tokens), more than "
            f"trainer.max_tokens_per_microbatch {most}"
        )


def engine_can_serve_the_adapter(config: "RunConfig") -> None:
    rank, most = config.trainer.lora.rank, config.engine.max_lora_rank
    if rank > most:
        raise ValueError(f"trainer.lora.rank {rank} is above the engine's maximum, engine.max_lora_rank {most}")


def own_gpus_are_of_separate_gpus(config: "RunConfig") -> None:
    first, colocation = config.trainer.first_gpu, config.engine.colocation
    if first and colocation != "separate_gpus":
        raise ValueError(
            f"trainer.first_gpu {first} with engine.colocation {colocation!r}: only with 'separate_gpus' the trainer has GPUs of its own"
        )


RULES: tuple[Callable[["RunConfig"], None], ...] = (
    groups_can_be_compared,
    zero_std_groups_need_two_samples,
    enough_prompts_are_drawn,
    minibatches_have_groups,
    minibatches_have_groups_of_the_batch,
    overlong_penalty_is_within_reach,
    correction_fields_have_an_effect,
    oversampling_is_not_deterministic,
    partial_rollouts_need_oversampling,
    partial_rollouts_need_a_correction,
    partial_rollouts_are_one_step_old,
    partial_rollouts_need_sglang,
    in_flight_updates_are_of_sglang,
    dynamic_sampling_is_of_one_step,
    curriculum_knows_the_step_before,
    longest_answer_fits_the_request_timeout,
    off_policy_adapter_is_retained,
    sampling_ahead_leaves_the_judge_an_engine,
    truncation_is_not_rewarded,
    turns_pay_no_kl,
    tasksets_play_their_own_tasks,
    episodes_fit_a_microbatch,
    exported_adapter_is_retained,
    sequences_fit_the_context,
    evaluations_fit_the_context,
    sequences_fit_a_microbatch,
    engine_can_serve_the_adapter,
    ruler_compares_several_samples,
    engine_can_judge,
    judge_takes_turns_with_the_engine,
    own_gpus_are_of_separate_gpus,
    routing_replay_is_possible,
    experts_can_be_shared,
    environment_fields_have_an_effect,
)
"""The first rule that a configuration breaks is the one whose error is raised."""
