"""What the scripts of this folder share: a run without Prefect, an adapter without training, and a result that is written as it grows."""

import argparse
import bisect
import json
import logging
import random
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from infra.colocation import plans
from infra.concurrency.background import in_background
from infra.concurrency.prefetch import Prefetch
from infra.config import DataConfig, EngineConfig, RewardConfig, RunConfig, SamplingConfig
from infra.config.tools.overrides import with_overrides
from infra.data.prompts import Prompt, tokenized
from infra.engines import open_engine
from infra.engines.interface import Engine, RolloutRequest
from infra.engines.server import server_process
from infra.engines.server.server_engine import CONTROL_TIMEOUT_S
from infra.engines.sglang.generate_api import values
from infra.machine import devices, nvml
from infra.megatron.lora.peft_files import adapter_shapes
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from infra.models import base_model
from infra.models.architecture import read_architecture
from infra.records import AdapterVersion, Step, StepReport
from infra.runs import external_adapter
from infra.runs.lineage import base_version
from infra.runs.opening import start_step
from infra.settings import settings
from infra.store import check_costs
from infra.store.files import open_workspace, read_json, sync_folder, write_json, write_json_lines
from infra.store.layout import StepFolder, adapter_folder, step_folder
from infra.store.samples import Sample
from infra.telemetry import memory_usage
from infra.telemetry.gpu_idle import gpu_idle_of
from infra.telemetry.timings import measures_of
from infra.trainers import start_early
from tasks.assemble import assemble
from tasks.draw_prompts import draw_prompts
from tasks.release_memory import release_memory
from tasks.reload_adapter import reload_adapter
from tasks.roll_out import roll_out
from tasks.score import score
from tasks.support.prefetch_rollout import behavior_adapter, prefetch_next_rollout, rollouts_during_training
from tasks.train import train
from tasks.wake_engine import wake_engine

LIMIT_S = 540.0
"""Nine minutes: where a command may take ten."""
NUM_CONTINUED_TOKENS = 4


def parser(about: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("out", type=Path)
    made.add_argument("--model", default="tiny", help="folder, hub id, or tiny")
    made.add_argument("--prompts", type=int, default=64)
    made.add_argument("--group", type=int, default=8)
    made.add_argument("--prompt-tokens", type=int, default=512)
    made.add_argument(
        "--full-prompts", action="store_true", help="whole steps: of --prompt-tokens each, not the data set's short ones"
    )
    made.add_argument("--output-tokens", type=int, default=512)
    made.add_argument("--rank", type=int, default=16)
    made.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of the run's configuration")
    made.add_argument("--limit-s", type=float, default=LIMIT_S, help="begins nothing that would end later (default: %(default)g)")
    made.add_argument("--small", action="store_true", help="on a CPU, to see that the script works; its figures say nothing")
    return made


class Bench:
    """Options, configuration, and the result so far."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        # Prefect has set it up already.
        logging.basicConfig(stream=sys.stdout, format="%(asctime)s %(message)s", level=logging.INFO, force=True)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self.options, self.begin = options, time.monotonic()
        if options.small:
            options.prompts, options.group, options.prompt_tokens, options.output_tokens, options.rank = 4, 2, 64, 24, 8
        elif not devices.num_gpus():
            sys.exit("no NVIDIA GPU here; --small tries the script out on a CPU")
        open_workspace()
        self.config = self._config(name)
        self.found: dict[str, Any] = {
            "command": sys.argv,
            "gpus": [f"{devices.processor()}, {gpu.total_bytes / 2**30:.0f} GiB" for gpu in nvml.read().gpus],
            "torch": torch.__version__,
        }

    def _config(self, name: str) -> RunConfig:
        o = self.options
        context = o.prompt_tokens + o.output_tokens
        engine = EngineConfig(
            max_context_tokens=context,
            max_running_requests=o.prompts * o.group,
            max_lora_rank=o.rank,
            deterministic=bool(o.small),
            start_timeout_s=300,
        )
        data = DataConfig(num_prompts=o.prompts, max_prompt_tokens=o.prompt_tokens)
        made = RunConfig(
            name=name,
            model=o.model,
            data=data.but(source=str(full_prompts(data, base_model.locate(o.model)))) if o.full_prompts else data,
            engine=engine,
            sampling=SamplingConfig(group_size=o.group, max_output_tokens=o.output_tokens),
            reward=RewardConfig(name="gsm8k_numeric" if o.model == "tiny" else "mechanical_reward.reward"),
        )
        lora = made.trainer.lora.but(rank=o.rank, alpha=2 * o.rank)
        return with_overrides(made.but(trainer=made.trainer.but(lora=lora)), o.set, name=name)

    def say(self, **figures: object) -> None:
        """Add to the result and write it: a run that is cut off leaves what it had found."""
        self.write(**figures)
        print(json.dumps(figures, indent=1, default=str), flush=True)

    def write(self, **figures: object) -> None:
        """As say, unsaid: between two steps that are timed."""
        self.found |= figures | {"seconds": round(time.monotonic() - self.begin, 1)}
        write_json(self.options.out, self.found)

    def has_time_for(self, seconds: float) -> bool:
        return time.monotonic() - self.begin + seconds < self.options.limit_s

    def prompts(self) -> list[Prompt]:
        """Of exactly prompt_tokens each, all different, without a text: for speed."""
        o, generator = self.options, torch.Generator().manual_seed(0)
        vocab = read_json(base_model.locate(o.model) / "config.json")["vocab_size"]
        rows = torch.randint(10, vocab, (o.prompts, o.prompt_tokens), generator=generator).tolist()
        return [Prompt(n, n, "?", "#### 1", row, seed=100 + n) for n, row in enumerate(rows)]

    def adapter(self, deviation: float = 0.01, zero: str | None = None) -> AdapterVersion:
        """An untrained adapter that is no zero: A and B are random, but for the tensors with `zero` in their names."""
        lora, folder = self.config.trainer.lora, settings().workspace / "random-adapter"
        folder.mkdir(parents=True, exist_ok=True)
        shapes = adapter_shapes(read_architecture(base_model.locate(self.options.model)), lora)
        generator = torch.Generator().manual_seed(1)
        tensors = {name: deviation * torch.randn(size, generator=generator) for name, size in shapes.items()}
        for name in [name for name in tensors if zero and zero in name]:
            tensors[name].zero_()
        save_file(tensors, folder / ADAPTER_WEIGHTS)
        about = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.target_modules)}
        write_json(folder / ADAPTER_CONFIG, about)
        return external_adapter.adopt(self.config, folder)

    def engine(self, adapter: AdapterVersion, **changes: object) -> Engine:
        return open_engine(self.config.engine.but(**changes), adapter)

    def base(self) -> AdapterVersion:
        return base_version(self.config)


def continued(text: list[int], adapter_name: str | None) -> tuple[list[int], list[float]]:
    """By the living SGLang: a few tokens, greedily, one after the other, and their log-probabilities in nats."""
    state = server_process.recorded()
    assert state
    sampling = {"temperature": 0, "max_new_tokens": NUM_CONTINUED_TOKENS, "ignore_eos": True}
    body = {"input_ids": text, "lora_path": adapter_name, "sampling_params": sampling, "return_logprob": True}
    answer = server_process.post(state.url, "/generate", body, CONTROL_TIMEOUT_S).json()
    return answer["output_ids"], values(answer, "output_token_logprobs")


def full_prompts(data: DataConfig, model: Path) -> Path:
    """A file of questions, enough for 16 steps, that make prompts of data.max_prompt_tokens or up to 2 fewer."""
    generator, rows = random.Random(0), []
    for _ in range(16 * data.num_prompts):
        text = " ".join(str(generator.randrange(1000)) for _ in range(data.max_prompt_tokens))
        fits = bisect.bisect_right(range(len(text)), data.max_prompt_tokens, key=lambda n: len(tokenized(data, model, text[:n])))
        rows.append({"question": text[: fits - 1], "answer": "#### 1"})
    return write_json_lines(settings().workspace / "full-prompts.jsonl", rows)


def timed_rollout(engine: Engine, prompts: list[Prompt], sampling: SamplingConfig, adapter: AdapterVersion) -> dict[str, float]:
    begin = time.monotonic()
    _, how = engine.generate(RolloutRequest(prompts, sampling, adapter))
    seconds = time.monotonic() - begin
    return {
        "seconds": seconds,
        "tokens_per_s": how.num_new_output_tokens / seconds,
        "tokens": how.num_new_output_tokens,
        "ttft_s": how.ttft_s,
        "prefix_cache_hit_frac": how.prefix_cache_hit_frac,
    }


def compared(before: list[Sample], after: list[Sample]) -> dict[str, Any]:
    pairs = list(zip(before, after, strict=True))
    equal = [(one, other) for one, other in pairs if one.output_tokens == other.output_tokens]
    differences = [abs(a - b) for one, other in equal for a, b in zip(one.output_logprobs, other.output_logprobs, strict=True)]
    return {
        "same_bits": before == after,
        "samples_with_other_tokens": len(pairs) - len(equal),
        "max_logprob_difference": max(differences, default=0.0),
    }


def whole_step(
    config: RunConfig, engine: EngineConfig, number: int, adapter: AdapterVersion, prefetch: Prefetch | None = None
) -> tuple[AdapterVersion, dict[str, Any]]:
    """All tasks of a step but its report, without Prefect: what the hand-over itself takes. With prefetch the next rollout begins when the
    engine serves the new adapter, as in a run."""
    now, trainer = start_step(config, number, prefetch), plans.resolve_colocation(config).trainer
    start_early(trainer, adapter)
    prompts = draw_prompts.fn(config.training, now, adapter)
    wake_engine.fn(engine, adapter, prefetch)
    rollouts = roll_out.fn(engine, config.sampling, prompts, behavior_adapter(config, now, adapter), prefetch)
    with in_background(release_memory.fn, engine, adapter):
        batch = assemble.fn(config.batch, score.fn(config.reward, rollouts, prompts))
    with rollouts_during_training(config, engine, now, adapter):
        trained = train.fn(trainer, batch, adapter)
    check_costs.taken()
    reload_adapter.fn(engine, trained)
    checks = check_costs.taken()
    prefetch_next_rollout(config, engine, now, trained, rollouts, prefetch)
    sync_folder(adapter_folder(trained.run, trained.version))
    write_json(step_folder(now) / "report.json", StepReport(run=now.run, step=number, adapter=trained, metrics={}).model_dump())
    return trained, figures_of(now) | {"reload_seconds": checks}


def figures_of(step: Step) -> dict[str, Any]:
    """By what was written down while a step ran."""
    result, verbs = read_json(StepFolder.of(step).train.result), measures_of(step.run, step.index)
    # Of the turns of episodes only their ends are known: their rollout's beginning stands for its first token.
    first_token_at = verbs["roll_out"].get("first_token_at") or verbs["roll_out"]["began_at"]
    return {
        **gpu_idle_of(step.run, step.index),
        "first_token_at": first_token_at,
        "sampling_s": verbs["roll_out"]["last_token_at"] - first_token_at,
        "rollout_tokens_per_s": verbs["roll_out"]["num_new_output_tokens"] / verbs["roll_out"]["seconds"],
        "seconds": {verb: figures["seconds"] for verb, figures in verbs.items()},
        "hand_over_seconds": hand_over_parts(verbs, result),
        "trainer_seconds": result["seconds"],
        "mismatch": result["metrics"]["mismatch/mean_abs_logprob_diff"],
        "mismatch_k3": result["metrics"]["mismatch/kl_k3"],
        "train_tokens_per_s": result["metrics"]["train/tokens_per_s"],
        "kv_cache_tokens": [verbs[verb]["kv_cache_tokens"] for verb in ("wake", "reload")],
        "memory": memory_usage.metrics_of(memory_usage.of_step(step.run, step.index)),
    }


def hand_over_parts(verbs: Mapping[str, Mapping[str, float]], result: Mapping[str, Any]) -> dict[str, float]:
    """Seconds from the last sampled token to the first training kernel, and from the last one to the engine's answering again.

    verbs: What was measured of each; result: the trainer's.
    """
    begin = {verb: figures["began_at"] for verb, figures in verbs.items()}
    end = {verb: begin[verb] + figures["seconds"] for verb, figures in verbs.items()}
    phase = result["began_at"]
    marks = [
        ("last token", verbs["roll_out"]["last_token_at"]),
        ("engine asked again, texts", end["roll_out"]),
        ("samples written", begin["score"]),
        ("release, score and batch beside it", max(end["release"], end["assemble"])),
        ("to the trainer", phase.get("adapter", phase["train"])),
        ("adapter read, to the first kernel", phase["train"]),
        ("training", phase["train"] + result["seconds"]["train"]),
        ("export, to the engine", begin["reload"]),
        ("reload", end["reload"]),
    ]
    found = {name: at - before for (_, before), (name, at) in pairwise(marks)}
    del found["training"]
    return found
