"""An oracle for runs of episodes: log-probabilities and whole updates, recomputed from a run's files by transformers, PEFT and torch alone.

    python tests/benches/oracle.py .ratchet/runs/NAME MODEL_FOLDER [--steps 4] [--json FILE]

It uses none of our code. For each step it reads the samples with their segments and rewards, and

* compares the log-probability of every sampled token, which came with the rollout, with that of the adapter that its segment names (nats). That
  is the step's own, or an older one where episodes were carried over or played ahead. `num_older` counts those tokens, and `older_by_own_diff` is
  how far they are from the step's own adapter: what a wrong name would look like;
* computes the step's gradient in float64: GRPO's advantages, the clipped loss as a mean over sampled tokens, truncated importance sampling where
  the run has it, torch's AdamW; and compares the whole update, adapter after minus before, with the adapter that the run wrote (relative L2 norm).

In the first step B is zero. The gradient of A is zero then, and A stays as it was: so its start is read from the adapter after the step. Adam's
first update of B is g / (|g| + eps) times the learning rate, little more than the sign of the gradient. Where |g| is near eps, the rounding of
float32 is divided by eps. `num_small` counts the elements with |g| below SMALL, and `update_error_of_others` leaves them out.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

STD_EPS = 1e-6
"""Of GRPO's advantage, (reward - mean) / (standard deviation + 1e-6)."""
SMALL = 1e-6
"""A hundred times Adam's eps: rounding of a gradient below this is seen in the first update."""
Tensors = dict[str, torch.Tensor]


class Sequence(NamedTuple):
    tokens: list[int]
    is_sampled: list[bool]
    logprobs: list[float]
    """0 where a token was given."""
    versions: list[int]
    """Version of the adapter of each sampled token."""
    advantage: float


def sequences(path: Path) -> list[Sequence]:
    """The samples of a step, with GRPO's advantages."""
    rows = pq.read_table(path).to_pylist()
    if any((row["branch"] and not row["segments"][0]["turn"]) or row["reward"] is None for row in rows):
        raise SystemExit(f"{path} has branches or failed episodes, which this script does not know")
    # an episode counts once, also where each of its turns is a sequence
    groups: dict[int, dict[int, float]] = defaultdict(dict)
    for row in rows:
        groups[row["prompt_id"]][row["sample_index"]] = row["reward"]
    return [sequence_of(row, [*groups[row["prompt_id"]].values()]) for row in rows]


def sequence_of(row: dict[str, Any], rewards: list[float]) -> Sequence:
    spans = row["segments"] or [
        {"kind": "given", "num_tokens": len(row["prompt_tokens"])}, {"kind": "sampled", "num_tokens": len(row["output_tokens"])},
    ]  # fmt: skip
    mean = math.fsum(rewards) / len(rewards)
    spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return Sequence(
        row["prompt_tokens"] + row["output_tokens"],
        [span["kind"] == "sampled" for span in spans for _ in range(span["num_tokens"])],
        [0.0] * len(row["prompt_tokens"]) + row["output_logprobs"],
        [
            span.get("adapter_version", row["adapter_version"])
            for span in spans
            if span["kind"] == "sampled"
            for _ in range(span["num_tokens"])
        ],
        (row["reward"] - mean) / (spread + STD_EPS),
    )


def logprobs_of(model: Any, sequence: Sequence, temperature: float) -> torch.Tensor:
    """Of its sampled tokens, in nats."""
    tokens = torch.tensor([sequence.tokens])
    scores = (model(tokens).logits[0, :-1] / temperature).log_softmax(-1)
    found = scores.gather(-1, tokens[0, 1:, None]).squeeze(-1)
    return found[torch.tensor(sequence.is_sampled[1:])]


def recorded(sequence: Sequence, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([x for x, ours in zip(sequence.logprobs, sequence.is_sampled, strict=True) if ours], dtype=dtype)


def adapter_file(run: Path, version: int) -> Path:
    return run / f"adapters/{version:06d}/adapter_model.safetensors"


def parameters(model: Any) -> Tensors:
    """The adapter's, by their names in an adapter's file."""
    named = {name.replace(".default", ""): each for name, each in model.named_parameters() if "lora_" in name}
    return dict(sorted(named.items()))


def set_adapter(model: Any, values: Tensors) -> None:
    with torch.no_grad():
        for name, parameter in parameters(model).items():
            parameter.copy_(values[name])


def before(run: Path, step: int) -> Tensors:
    """The adapter before a step. That of the first one has the A of the next and a B of zeros."""
    if step:
        return load_file(adapter_file(run, step))
    first = load_file(adapter_file(run, 1))
    return {name: each if "lora_A" in name else torch.zeros_like(each) for name, each in first.items()}


def older_logprobs(model: Any, run: Path, found: list[Sequence], own: int, temperature: float) -> list[torch.Tensor]:
    """For each sequence the log-probabilities of its sampled tokens by the adapters that sampled them; of those of the version `own` any value.
    The model is left with another adapter."""
    dtype = next(model.parameters()).dtype
    values = [torch.zeros(len(each.versions), dtype=dtype) for each in found]
    for version in sorted({version for each in found for version in each.versions} - {own}):
        set_adapter(model, before(run, version))
        for sequence, of_tokens in zip(found, values, strict=True):
            if version in sequence.versions:
                is_of_it = torch.tensor(sequence.versions) == version
                with torch.no_grad():
                    of_tokens[is_of_it] = logprobs_of(model, sequence, temperature)[is_of_it]
    return values


def backward(model: Any, found: list[Sequence], config: dict[str, Any], own: int, older: list[torch.Tensor]) -> dict[str, float]:
    """Sum the gradients of the loss. Returns how far the log-probabilities of the rollout are from those of the adapters that sampled, in nats.

    own: Version of the adapter that the model has. older: See older_logprobs.
    """
    loss, dtype = config["trainer"]["loss"], next(model.parameters()).dtype
    num_tokens = sum(sum(each.is_sampled) for each in found)
    differences, by_own = [], [torch.zeros(1, dtype=dtype)]
    for sequence, of_older in zip(found, older, strict=True):
        if not any(sequence.is_sampled):
            continue
        new, sampled = logprobs_of(model, sequence, config["sampling"]["temperature"]), recorded(sequence, dtype)
        is_own = torch.tensor(sequence.versions) == own
        differences.append((torch.where(is_own, new.detach(), of_older) - sampled).abs())
        by_own.append((new.detach() - sampled).abs()[~is_own])
        old = new.detach() if loss["correction"]["mode"] == "decoupled" else sampled
        weight = (old - sampled).exp().clamp(max=loss["correction"]["cap"]) if loss["correction"]["kind"] == "tis" else 1.0
        ratio = (new - old).exp()
        clipped = ratio.clamp(1 - loss["clip_low"], 1 + loss["clip_high"])
        gain = torch.minimum(ratio * sequence.advantage, clipped * sequence.advantage)
        (-(weight * gain).sum() / num_tokens).backward()
    every, of_others = torch.cat(differences), torch.cat(by_own)
    return {
        "num_tokens": num_tokens,
        "max_logprob_diff": every.max().item(),
        "mean_logprob_diff": every.mean().item(),
        "num_older": len(of_others) - 1,
        "older_by_own_diff": of_others.max().item(),
    }


def check_config(config: dict[str, Any]) -> None:
    """Raises SystemExit for a run that was trained by another loss than this script knows."""
    trainer, loss = config["trainer"], config["trainer"]["loss"]
    expected = {
        "batch.advantage": (config["batch"]["advantage"], "grpo"),
        "batch.advantage_level": (config["batch"]["advantage_level"], "episode"),
        "loss.kind": (loss["kind"], "ppo"),
        "loss.aggregation": (loss["aggregation"], "token_mean"),
        "loss.kl.coefficient": (loss["kl"]["coefficient"], 0.0),
        "loss.entropy_bonus": (loss["entropy_bonus"], 0.0),
        "loss.correction.level": (loss["correction"]["level"], "token"),
        "trainer.num_minibatches": (trainer["num_minibatches"], 1),
        "trainer.lr_scheduler_type": (trainer["lr_scheduler_type"], "constant"),
        "trainer.lr_warmup_steps": (trainer["lr_warmup_steps"], 0),
    }
    if (kind := loss["correction"]["kind"]) not in ("none", "tis"):
        raise SystemExit(f"loss.correction.kind is {kind!r}, this script knows 'none' and 'tis'")
    for name, (value, wanted) in expected.items():
        if value != wanted:
            raise SystemExit(f"{name} is {value!r}, this script knows {wanted!r}")


def model_with_adapter(run: Path, folder: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model: Any = get_peft_model(base, LoraConfig.from_pretrained(str(adapter_file(run, 1).parent)))
    assert isinstance(model, PeftModel)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model.double().eval()


def steps(run: Path, folder: Path, num: int) -> Iterator[dict[str, float]]:
    """The figures of each step. AdamW's moments come from the gradients of the steps before."""
    config = json.loads((run / "steps/000000/config.json").read_bytes())
    check_config(config)
    trainer, model = config["trainer"], model_with_adapter(run, folder)
    mine = parameters(model)
    adam = torch.optim.AdamW(
        mine.values(), lr=trainer["learning_rate"], betas=(trainer["adam_beta1"], trainer["adam_beta2"]), eps=trainer["adam_eps"],
        weight_decay=trainer["weight_decay"],
    )  # fmt: skip
    for step in range(num):
        if not adapter_file(run, step + 1).exists():
            return
        found = sequences(run / f"steps/{step:06d}/scored.parquet")
        older = older_logprobs(model, run, found, step, config["sampling"]["temperature"])
        start = before(run, step)
        set_adapter(model, start)
        adam.zero_grad()
        figures = backward(model, found, config, step, older)
        norm = torch.nn.utils.clip_grad_norm_(mine.values(), trainer["max_grad_norm"]).item()
        gradients = {name: each.grad.clone() for name, each in mine.items() if each.grad is not None}
        adam.step()
        yield {
            "step": step + 1,
            "grad_norm": norm,
            **figures,
            **compared(mine, start, load_file(adapter_file(run, step + 1)), gradients),
        }


def compared(mine: Tensors, start: Tensors, after: Tensors, gradients: Tensors) -> dict[str, float]:
    """Compare the update with the run's: relative L2 norm, of all elements and without those whose gradient is small."""
    error = {name: after[name].double() - mine[name].detach() for name in mine}
    update = {name: mine[name].detach() - start[name].double() for name in mine}
    large = {name: gradients[name].abs() >= SMALL for name in mine}
    return {
        "update_error": norm_of(error) / norm_of(update),
        "update_error_of_others": norm_of({name: error[name] * large[name] for name in mine}) / norm_of(update),
        "num_small": sum(int((~large[name] & (update[name] != 0)).sum()) for name in mine),
        "num_elements": sum(each.numel() for each in mine.values()),
    }


def norm_of(tensors: Tensors) -> float:
    return math.sqrt(sum(each.double().square().sum().item() for each in tensors.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for figures in steps(options.run, options.model, options.steps):
        print(" ".join(f"{name} {value:.3g}" for name, value in figures.items()), flush=True)
        found.append(figures)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
