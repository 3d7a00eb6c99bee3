"""Trajectories of several turns against plain PyTorch: Hugging Face's model and PEFT's adapters give the log-probabilities of every sampled
segment, autograd and AdamW the update. Shared histories and branches are in the batch, each turn has an advantage of its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from infra.config import BatchConfig, LossConfig
from infra.data.packing import packed
from infra.data.turns.credit import with_advantages
from infra.megatron.loss.batch import read_batch, token_weights
from infra.store.samples import Sample, sample_of
from infra.trajectories.segments import Segment, Trajectory

CONFIG = BatchConfig(advantage="rloo", advantage_level="turn", turn_discount=0.9)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def logprobs_of(net: nn.Module, tokens: Tensor) -> Tensor:
    """Nats at each token but the first."""
    return net(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def episodes(seed: int) -> list[Sample]:
    """Two tasks of three episodes of 1 to 3 turns; the first episode of each has a second branch that leaves it after its first turn."""
    rng, samples = np.random.default_rng(seed), []

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, 512, rng.integers(least, most)).tolist())

    def turn(number: int, given: tuple[int, ...]) -> list[Segment]:
        said = tokens(3, 9)
        values = tuple(rng.uniform(-7, -6, len(said)).tolist())
        return [
            Segment("given", given, number),
            Segment("sampled", said, number, values, 0, "base", int(rng.integers(99)), "stop"),
        ]

    for task in range(2):
        prompt = tokens(6, 12)
        for index in range(3):
            turns = [turn(number, prompt if number == 0 else tokens(2, 7)) for number in range(index + 1 if task else 3 - index)]
            branches = [turns, [turns[0], turn(1, tokens(2, 5))]] if len(turns) > 1 and index == 2 * task else [turns]
            for branch, each in enumerate(branches):
                whole = Trajectory(f"{task}/{index}", tuple(s for pair in each for s in pair), branch, "done")
                rewards = tuple(rng.normal(size=len(each)).tolist())
                made = sample_of(whole, task, index)
                samples.append(replace(made, reward=float(sum(rewards)), turn_rewards=rewards))
    return samples


def tensors_of(samples: list[Sample]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for name, values in packed(with_advantages(samples, CONFIG), CONFIG).items()}


def reference_loss(net: nn.Module, samples: list[Sample], aggregation: str) -> Tensor:
    """PPO's clipped loss, written from the segments alone: sampled ones carry loss, a branch's copies of earlier ones do not."""
    losses: list[tuple[tuple[int, int], Tensor]] = []
    seen: set[tuple[object, ...]] = set()
    for sample in with_advantages(samples, CONFIG):
        sequence = torch.tensor([*sample.prompt_tokens, *sample.output_tokens])
        logprobs, end, said, turn = logprobs_of(net, sequence), 0, [], 0
        for span in sample.segments:
            begin, end = end, end + span.num_tokens
            if span.is_sampled:
                key = (*sample.episode, *sequence[:end].tolist(), span)
                if key not in seen:
                    first = begin - len(sample.prompt_tokens)
                    old = torch.tensor(np.asarray(sample.output_logprobs[first : first + span.num_tokens], np.float32))
                    ratio = (logprobs[begin - 1 : end - 1] - old).exp()
                    assert sample.turn_advantages is not None
                    advantage = sample.turn_advantages[turn]
                    said.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))
                seen.add(key)
                turn += 1
        losses.append((sample.episode, torch.cat(said)))
    match aggregation:
        case "token_mean":
            return torch.cat([loss for _, loss in losses]).mean()
        case "seq_mean_token_mean":
            return torch.stack([loss.mean() for _, loss in losses]).mean()
    by_episode: dict[tuple[int, int], list[Tensor]] = {}
    for episode, loss in losses:
        by_episode.setdefault(episode, []).append(loss)
    return torch.stack([torch.cat(each).mean() for each in by_episode.values()]).mean()


def adapted(base: PreTrainedModel, start: dict[str, Tensor]) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A PEFT model with these adapter weights."""
    net = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    parameters = {name.replace(".default", ""): p for name, p in net.named_parameters() if p.requires_grad}
    assert parameters.keys() == start.keys()
    for name, parameter in parameters.items():
        parameter.data.copy_(start[name])
    return net, parameters


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "episode_mean_token_mean"])
def test_log_probabilities_and_update_of_trajectories_are_those_of_hugging_face_peft_and_autograd(
    aggregation: str, model: Callable[[str], Path], hugging_face: Callable[[Path], PreTrainedModel], train: Callable[..., Any]
) -> None:
    settings: dict[str, Any] = {
        "lora": {"rank": 8, "alpha": 16, "target_modules": TARGETS},
        "loss": {"aggregation": aggregation},
        "max_grad_norm": 1e9,
        "adam_eps": 1e-4,  # a smaller one makes the rounding of the smallest gradients as large as the learning rate
    }
    before = train("qwen3", batch=tensors_of(episodes(0)), **settings)
    samples = episodes(1)
    net, parameters = adapted(hugging_face(model("qwen3")), before.adapter)
    with torch.no_grad():  # the engine's values are the reference's, so the trainer's mismatch is its distance to it
        for number, sample in enumerate(samples):
            values = logprobs_of(net, torch.tensor([*sample.prompt_tokens, *sample.output_tokens]))[
                len(sample.prompt_tokens) - 1 :
            ]
            samples[number] = replace(sample, output_logprobs=np.where(sample.is_sampled, values.numpy(), 0.0).tolist())
    run = train("qwen3", after=before, batch=tensors_of(samples), **settings)
    assert 0 < run.metrics["mismatch/max_abs_logprob_diff"] < 1e-5
    loss = reference_loss(net, samples, aggregation)
    loss.backward()  # type: ignore[no-untyped-call]
    assert run.metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-6)
    adam = torch.optim.AdamW(parameters.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    for name, parameter in parameters.items():
        moments = {which: before.moments[f"{which}.{name}"].clone() for which in ("exp_avg", "exp_avg_sq")}
        adam.state[parameter] = {"step": torch.tensor(1.0), **moments}
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    adam.step()
    # The first moment holds the gradient, the weights the whole update.
    gradient = distance(
        {n: run.moments[f"exp_avg.{n}"] for n in start}, {n: adam.state[p]["exp_avg"] for n, p in parameters.items()}
    )
    update = distance({n: run.adapter[n] - start[n] for n in start}, {n: p.detach() - start[n] for n, p in parameters.items()})
    print(f"{aggregation}: gradient {gradient:.1e}, update {update:.1e}, {run.metrics['mismatch/max_abs_logprob_diff']:.1e} nats")
    assert gradient < 1e-5
    assert update < 1e-5


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference as a share of the norm."""
    a, b = (torch.cat([values[name].flatten().double() for name in sorted(values)]) for values in (found, expected))
    return float((a - b).norm() / b.norm())


def test_the_weights_of_an_episode_are_those_of_its_branches_together(new_job: Callable[..., Any]) -> None:
    batch = read_batch(new_job(batch=tensors_of(episodes(0))).job.batch_path)
    assert batch.episodes is not None and len(set(batch.episodes)) < batch.num_sequences
    sequences = list(range(batch.num_sequences))
    weights = token_weights(batch, sequences, LossConfig(aggregation="episode_mean_token_mean"))
    for episode in set(batch.episodes):
        share = sum(float(weights[batch.span(s)].sum()) for s in sequences if batch.episodes[s] == episode)
        assert share == pytest.approx(1 / len(set(batch.episodes)))
    by_sequence = LossConfig(aggregation="seq_mean_token_mean")
    alone = replace(batch, episodes=None)
    one = token_weights(alone, sequences, LossConfig(aggregation="episode_mean_token_mean"))
    assert torch.equal(one, token_weights(alone, sequences, by_sequence))
