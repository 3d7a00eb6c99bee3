"""A plan of a machine in words: how the GPUs are shared, why one way is faster, and the options that choose it."""

from infra.simulation.machine_plan import MachinePlan, Planned, PlannedStep

NOTICED_S = 0.05


def lines_of(found: MachinePlan) -> list[str]:
    """The best ways with seconds, memory and reasons."""
    first, lines = found.best[0], [f"rates: {found.best[0].candidate.rates.source}"]
    for number, each in enumerate(found.best, 1):
        c = each.candidate
        known = "measured" if c.rates.source.startswith("measured in run") else "estimate"
        lines += [
            f"{number}. {each.step_s:.1f} s a step ({known})  {sharing(each)}",
            f"   GiB a GPU: engine {c.engine_gib:.0f}, training {c.trainer_gib:.0f}; GPUs idle {each.gpu_idle_share:.0%}",
            f"   {why_not(each, first) if number > 1 else why_first(each)}",
        ]
    if found.on_policy and found.on_policy not in found.best:
        lines.append(f"On-policy: {found.on_policy.step_s:.1f} s  {sharing(found.on_policy)}")
    return lines


def sharing(planned: Planned) -> str:
    c = planned.candidate
    split = f", {c.engine.replicas} replicas of {c.engine.tensor_parallel}" if c.engine.replicas != 1 else ""
    engine = f"engine {_gpus(c.engine_gpus)}{split}"
    trainer = f"trainer {_gpus(c.trainer_gpus)}, {_layout(planned)}"
    if c.is_split:
        return f"GPUs of their own: {engine}; {trainer}; max_staleness {c.scenario.max_staleness}"
    return f"in turns: {engine}; {trainer}; {c.engine.colocation}"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _layout(planned: Planned) -> str:
    t = planned.candidate.trainer
    sizes = {"TP": t.tensor_parallel, "EP": t.expert_parallel, "DP": t.num_processes // t.tensor_parallel}
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "DP"]
    return " ".join([*words, "recomputed"] if t.recompute else words)


def why_first(first: Planned) -> str:
    parts = f"rollout {first.rollout_s:.1f} s, training {first.train_s:.1f} s"
    if first.candidate.is_split:
        longer = "training" if first.train_s > first.rollout_s else "rollout"
        return f"First, because both run side by side ({parts}): a step takes little more than its {longer}."
    return f"First, because all its GPUs work in both parts ({parts}), and no faster way fits."


def why_not(other: Planned, first: Planned) -> str:
    """One sentence: by what another way is slower, and which part of it."""
    slower_s = other.step_s - first.step_s
    more = f"{slower_s:.1f} s slower" if slower_s >= NOTICED_S else "As fast, with more GPUs or a costlier layout"
    parts = f"rollout {other.rollout_s:.1f} s, training {other.train_s:.1f} s"
    if not other.candidate.is_split and first.candidate.is_split:
        return f"{more}: the parts take turns ({parts}); in exchange it is on-policy."
    if not other.candidate.is_split:
        return f"{more}: fewer GPUs, or a layout that costs more ({parts})."
    longer = "training" if other.train_s > other.rollout_s else "rollout"
    return f"{more}: its {longer} is the longer part ({parts})."


def environment(planned: Planned) -> str:
    """Settings that give engine and trainer their GPUs; empty where they take turns."""
    c = planned.candidate
    if not c.is_split:
        return ""
    numbers = [str(number) for number in range(c.engine_gpus + c.trainer_gpus)]
    engine, trainer = ",".join(numbers[: c.engine_gpus]), ",".join(numbers[c.engine_gpus :])
    return f"RATCHET_ENGINE_GPUS='[{engine}]' RATCHET_TRAINER_GPUS='[{trainer}]'"


def options(planned: Planned, work: PlannedStep) -> dict[str, str]:
    """Field of a run's configuration -> value."""
    c = planned.candidate
    found: dict[str, object] = {
        "data.num_prompts": work.num_prompts,
        "sampling.group_size": work.group_size,
        "sampling.max_output_tokens": work.output_tokens,
        "engine.max_context_tokens": c.engine.max_context_tokens,
        "engine.max_lora_rank": work.rank,
        "engine.max_running_requests": c.engine.max_running_requests,
        "engine.replicas": c.engine.replicas,
        "engine.tensor_parallel": c.engine.tensor_parallel,
        "trainer.lora.rank": work.rank,
        "trainer.num_processes": c.trainer.num_processes,
        "trainer.tensor_parallel": c.trainer.tensor_parallel,
        "trainer.sequence_parallel": str(c.trainer.sequence_parallel).lower(),
        "trainer.expert_parallel": c.trainer.expert_parallel,
        "trainer.max_tokens_per_microbatch": c.trainer.microbatch_tokens,
        "trainer.recompute": str(c.trainer.recompute).lower(),
    }
    if c.is_split:
        found |= {"trainer.loss.correction.mode": "decoupled", "trainer.loss.correction.kind": "tis"}
        found["trainer.loss.correction.max_staleness"] = work.max_staleness
    return {name: str(value) for name, value in found.items()}


def command(planned: Planned, work: PlannedStep, model: str) -> str:
    """What to paste into a terminal."""
    words = [f"--{name} {value}" for name, value in options(planned, work).items()]
    lines = [environment(planned), f"ratchet run --model {model}", *(" ".join(words[i : i + 3]) for i in range(0, len(words), 3))]
    return " \\\n    ".join(filter(None, lines))
