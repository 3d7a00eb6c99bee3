"""Every part of the objectives in whole jobs: against the formulas written once more in plain PyTorch, and under every layout."""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from infra.config import LossConfig
from infra.megatron.lora.layers import Shard, initialize
from infra.megatron.lora.peft_files import adapter_shapes
from infra.megatron.program.canary import CanaryProbe
from infra.megatron.protocol.optimizer_files import num_steps
from infra.models.architecture import read_architecture

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo": {
        "loss": {
            "dual_clip": 1.5,
            "kl": {"coefficient": 0.05, "estimator": "k1", "where": "reward"},
        },
        "num_minibatches": 2,
        "lr_warmup_steps": 4,
    },
    "gspo": {
        "loss": {
            "kind": "gspo",
            "aggregation": "seq_mean_token_mean",
            "kl": {"coefficient": 0.5, "estimator": "k3"},
            "entropy_bonus": 0.05,
            "correction": {"mode": "decoupled", "kind": "tis", "level": "sequence", "cap": 1.5},
        },
        "num_minibatches": 2,
        "lr_scheduler_type": "cosine",
        "num_schedule_steps": 6,
        "min_lr_ratio": 0.1,
    },
    "cispo": {
        "loss": {
            "kind": "cispo",
            "aggregation": "seq_mean_token_sum_norm",
            "loss_scale_factor": 30,
            "kl": {"coefficient": 0.05, "estimator": "k2", "where": "reward"},
            "correction": {"mode": "decoupled", "kind": "icepop", "floor": 0.7, "cap": 1.6},
        },
        "num_minibatches": 4,
    },
    "mis": {
        "loss": {"correction": {"mode": "decoupled", "kind": "mis", "cap": 1.5}, "kl": {"coefficient": 0.5, "estimator": "k2"}},
    },
}
# Adam divides by a gradient's own size; a larger eps keeps the float noise of a gradient near zero from growing over the steps.
CALM = {"adam_eps": 1e-3}


@pytest.fixture(scope="session")
def grouped(make_batch: Callable[..., dict[str, Tensor]]) -> Callable[[int], dict[str, Tensor]]:
    """Four groups of two, of which one sequence teaches nothing; log-probabilities near those of the model."""

    def make(seed: int) -> dict[str, Tensor]:
        batch = make_batch(seed=seed)
        start, end = batch["cu_seqlens"][3:5]
        batch["loss_mask"][start:end] = 0
        return batch | {
            "groups": torch.tensor([7, 7, 3, 3, 9, 9, 1, 1]),
            "rewards": torch.randn(8, generator=torch.Generator().manual_seed(seed)),
        }

    return make


def test_each_objective_is_told_apart_from_the_others(ends: dict[str, list[Any]]) -> None:
    assert len({run.metrics["train/grad_norm"] for runs in ends.values() for run in runs}) == 2 * len(OBJECTIVES)


@pytest.fixture(scope="session")
def ends(train: Callable[..., Any], grouped: Callable[[int], dict[str, Tensor]]) -> dict[str, list[Any]]:
    """Two RL steps of each objective in one process."""
    runs: dict[str, list[Any]] = {}
    for name, settings in OBJECTIVES.items():
        first = train(batch=grouped(0), metadata={"advantage": "rloo"}, **settings, **CALM)
        runs[name] = [first, train(after=first, batch=grouped(1), metadata={"advantage": "rloo"}, **settings, **CALM)]
    return runs


def logprobs_of(net: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    logp = net(tokens[None]).logits[0, :-1].log_softmax(-1)
    return logp.gather(1, tokens[1:, None])[:, 0], -(logp.exp() * logp).sum(-1)


class Reference:
    """RL steps in plain PyTorch: one sequence after the other, each formula as in docs/objectives.md."""

    def __init__(self, base: PreTrainedModel, path: Path, settings: dict[str, Any]) -> None:
        self.net = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
        self.parameters = {n.replace(".default", ""): p for n, p in self.net.named_parameters() if p.requires_grad}
        shards = [Shard(name, p, None, None, False) for name, p in self.parameters.items()]
        lora = type("Lora", (), {"rank": 8, "target_modules": TARGETS})()
        initialize(shards, adapter_shapes(read_architecture(path), lora), None, seed=0)  # type: ignore[arg-type]
        self.adam = torch.optim.AdamW(self.parameters.values(), betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)
        self.c, self.settings, self.taken = LossConfig(**settings["loss"]), settings, 0

    def step(self, batch: dict[str, Tensor], expected: dict[str, float]) -> None:
        sequences = list(self.sequences(batch))
        if self.c.kl.where == "reward":
            for s in sequences:
                old = s["rollout"] if self.c.correction.mode == "bypass" else s["old"]
                s["reward"] = s["reward"] - self.c.kl.coefficient * (self.kl(old, s["reference"]) * s["mask"]).sum()
            for a, b in zip(sequences[::2], sequences[1::2], strict=True):  # rloo with two in a group
                a["advantage"], b["advantage"] = a["reward"] - b["reward"], b["reward"] - a["reward"]
        count = self.settings.get("num_minibatches", 1)
        losses, norms = [], []
        for start in range(0, 8, 8 // count):
            part = [s for s in sequences[start : start + 8 // count] if s["mask"].any()]
            self.adam.zero_grad()
            loss = self.loss(part)
            loss.backward()  # type: ignore[no-untyped-call]
            norms.append(float(nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)))
            self.adam.param_groups[0]["lr"] = rate = 1e-2 * self.schedule()
            self.adam.step()
            self.taken += 1
            losses.append(loss.item())
        assert expected["train/loss"] == pytest.approx(sum(losses) / count, rel=1e-4, abs=2e-6)
        assert expected["train/grad_norm"] == pytest.approx(sum(norms) / count, rel=1e-4)
        assert expected["train/learning_rate"] == pytest.approx(rate)

    def sequences(self, batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        for i, (start, end) in enumerate(pairwise(batch["cu_seqlens"].tolist())):
            here, tokens = slice(start + 1, end), batch["tokens"][start:end]
            said = {}
            for name, context in (("old", nullcontext()), ("reference", self.net.disable_adapter())):
                with torch.no_grad(), context:
                    said[name] = logprobs_of(self.net, tokens)[0]
            yield said | {
                "tokens": tokens,
                "mask": batch["loss_mask"][here].float(),
                "rollout": batch["rollout_logprobs"][here],
                "advantage": batch["advantages"][end - 1],
                "reward": batch["rewards"][i],
            }

    def schedule(self) -> float:
        match self.settings:
            case {"lr_warmup_steps": warmup}:
                return min(1.0, (self.taken + 1) / warmup)
            case {"num_schedule_steps": steps, "min_lr_ratio": least}:
                return least + (1 - least) * (1 + cos(pi * min(1.0, self.taken / steps))) / 2
        return 1.0

    def kl(self, logprobs: Tensor, reference: Tensor) -> Tensor:
        d = logprobs - reference
        return {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() + d - 1}[self.c.kl.estimator]

    def weight(self, s: dict[str, Tensor]) -> Tensor:
        c, log_w = self.c.correction, (s["old"] - s["rollout"]) * s["mask"]
        w = (log_w.sum().expand(len(log_w)) if c.level == "sequence" else log_w).exp()
        match c.kind:
            case "tis":
                return w.clamp(max=c.cap)
            case "mis":
                return w * (w <= c.cap)
            case "icepop":
                return w * (w <= c.cap) * (w >= c.floor)
        return torch.ones_like(w)

    def token_losses(self, s: dict[str, Tensor]) -> Tensor:
        logprobs, entropies = logprobs_of(self.net, s["tokens"])
        old, a = s["rollout"] if self.c.correction.mode == "bypass" else s["old"], s["advantage"]
        ratio = ((logprobs - old) * s["mask"]).exp()
        if self.c.kind == "gspo":
            ratio = (((logprobs - old) * s["mask"]).sum() / s["mask"].sum()).exp().expand(len(logprobs))
        clipped = ratio.clamp(0.8, 1.28)
        loss = torch.maximum(-a * ratio, -a * clipped)
        if self.c.dual_clip and a < 0:
            loss = torch.minimum(loss, -a * self.c.dual_clip)
        if self.c.kind == "cispo":
            loss = -clipped.detach() * a * logprobs
        loss = loss * self.weight(s) - self.c.entropy_bonus * entropies
        if self.c.kl.where == "loss":
            loss = loss + self.c.kl.coefficient * self.kl(logprobs, s["reference"])
        return loss * s["mask"]

    def loss(self, part: list[dict[str, Tensor]]) -> Tensor:
        sums, counts = [self.token_losses(s).sum() for s in part], [s["mask"].sum() for s in part]
        match self.c.aggregation:
            case "token_mean":
                return torch.stack(sums).sum() / torch.stack(counts).sum()
            case "seq_mean_token_mean":
                return torch.stack([x / n for x, n in zip(sums, counts, strict=True)]).mean()
        return torch.stack(sums).mean() / 30


@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_rl_steps_of_each_objective_are_those_of_plain_pytorch(
    name: str,
    ends: dict[str, list[Any]],
    model: Callable[[str], Path],
    hugging_face: Callable[[Path], PreTrainedModel],
    grouped: Callable[[int], dict[str, Tensor]],
) -> None:
    reference = Reference(hugging_face(model("qwen3")), model("qwen3"), OBJECTIVES[name])
    for seed, run in enumerate(ends[name]):
        reference.step(grouped(seed), run.metrics)
    for tensor, parameter in reference.parameters.items():
        torch.testing.assert_close(ends[name][1].adapter[tensor], parameter.detach(), atol=1e-4, rtol=0)


TWO = {"num_processes": 2}
LAYOUTS = {
    "data parallel": TWO,
    "data parallel, small micro-batches": TWO | {"max_tokens_per_microbatch": 45},
    "tensor parallel": TWO | {"tensor_parallel": 2},
    "sequence parallel": TWO | {"tensor_parallel": 2, "sequence_parallel": True},
}


@pytest.fixture(scope="session")
def spread(
    new_job: Callable[..., Any],
    train_on_two: Callable[..., None],
    grouped: Callable[[int], dict[str, Tensor]],
    ends: dict[str, list[Any]],
) -> dict[tuple[str, str], Any]:
    """The second RL step of each objective, on two ranks."""
    runs = {
        (name, layout): new_job(
            after=ends[name][0], batch=grouped(1), metadata={"advantage": "rloo"}, **settings, **CALM, **LAYOUTS[layout]
        )
        for name, settings in OBJECTIVES.items()
        for layout in LAYOUTS
    }
    train_on_two(list(runs.values()))
    return runs


def assert_same(run: Any, expected: Any) -> None:
    assert run.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
    for tensor, value in expected.adapter.items():
        torch.testing.assert_close(run.adapter[tensor], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_objective_learns_the_same_under_every_layout(
    name: str, layout: str, ends: dict[str, list[Any]], spread: dict[tuple[str, str], Any]
) -> None:
    assert_same(spread[name, layout], ends[name][1])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_do_not_show(
    name: str, ends: dict[str, list[Any]], train: Callable[..., Any], grouped: Callable[[int], dict[str, Tensor]]
) -> None:
    settings = OBJECTIVES[name] | CALM | {"max_tokens_per_microbatch": 45}
    assert_same(train(after=ends[name][0], batch=grouped(1), metadata={"advantage": "rloo"}, **settings), ends[name][1])


def test_the_first_step_of_decoupled_mode_has_ratio_one(ends: dict[str, list[Any]]) -> None:
    for run in ends["mis"]:
        assert (run.metrics["train/ratio_mean"], run.metrics["train/ppo_kl"], run.metrics["train/clip_frac"]) == (1.0, 0.0, 0.0)
        assert 0 < run.metrics["mismatch/out_of_band_frac"] < 1
        assert 0 < run.metrics["mismatch/weight_mean"] < 1.5
    assert ends["mis"][0].metrics["train/kl_ref"] == 0, "a new adapter is the base model"
    assert ends["mis"][1].metrics["train/kl_ref"] > 0


def test_recorded_old_logprobs_give_ratio_one_too(train: Callable[..., Any], grouped: Callable[[int], dict[str, Tensor]]) -> None:
    """A learning rate too small to move a float: four mini-batches, all of them against what was recorded before the first."""
    loss = {"correction": {"mode": "decoupled"}}
    run = train(batch=grouped(0), loss=loss, num_minibatches=4, learning_rate=1e-30)
    assert (run.metrics["train/ratio_mean"], run.metrics["train/ppo_kl"]) == (1.0, 0.0)
    assert run.metrics["train/num_optimizer_steps"] == 4


def test_a_second_mini_batch_has_left_the_old_policy(ends: dict[str, list[Any]]) -> None:
    assert ends["gspo"][0].metrics["train/ratio_mean"] != 1.0
    assert ends["gspo"][0].metrics["train/ppo_kl"] != 0.0


def test_the_optimizer_counts_its_own_steps(ends: dict[str, list[Any]]) -> None:
    first, second = ends["cispo"]
    assert [run.result.adapter_version for run in (first, second)] == [1, 2]
    assert [run.result.num_optimizer_steps for run in (first, second)] == [4, 8]
    assert num_steps(second.job.output_dir) == 8


def test_fewer_groups_than_mini_batches_make_fewer_steps(
    train: Callable[..., Any], grouped: Callable[[int], dict[str, Tensor]]
) -> None:
    run = train(batch=grouped(0), num_minibatches=10)
    assert run.result.num_optimizer_steps == 4


def test_the_same_job_twice_gives_the_same_bytes(
    train: Callable[..., Any], ends: dict[str, list[Any]], grouped: Callable[..., Any]
) -> None:
    again = train(batch=grouped(0), metadata={"advantage": "rloo"}, **OBJECTIVES["gspo"], **CALM)
    for path in sorted(path for path in again.job.output_dir.rglob("*") if path.is_file()):
        assert path.read_bytes() == (ends["gspo"][0].job.output_dir / path.relative_to(again.job.output_dir)).read_bytes(), (
            path.name
        )


def test_a_small_penalty_in_the_reward_leaves_the_advantages_of_the_batch(
    train: Callable[..., Any], grouped: Callable[[int], dict[str, Tensor]]
) -> None:
    """The trainer makes advantages again exactly as they were made."""
    batch = grouped(0)
    for a in range(0, 8, 2):
        for s, other in ((a, a + 1), (a + 1, a)):
            here = slice(*batch["cu_seqlens"][s : s + 2].tolist())
            batch["advantages"][here] = (batch["rewards"][s] - batch["rewards"][other]) * batch["loss_mask"][here]
    kl = {"coefficient": 1e-20, "where": "reward"}
    penalised = train(batch=batch, metadata={"advantage": "rloo"}, loss={"kl": kl})
    assert penalised.metrics["train/loss"] == pytest.approx(train(batch=batch).metrics["train/loss"], abs=1e-6)


def test_recomputation_does_not_show_in_passes_without_gradients(
    train: Callable[..., Any], ends: dict[str, list[Any]], grouped: Callable[[int], dict[str, Tensor]]
) -> None:
    assert_same(
        train(
            after=ends["gspo"][0], batch=grouped(1), metadata={"advantage": "rloo"}, recompute=True, **OBJECTIVES["gspo"], **CALM
        ),
        ends["gspo"][1],
    )


def test_experts_on_two_ranks_take_part_in_every_pass(
    new_job: Callable[..., Any],
    train: Callable[..., Any],
    train_on_two: Callable[..., None],
    grouped: Callable[[int], dict[str, Tensor]],
) -> None:
    settings = OBJECTIVES["cispo"] | CALM
    alone = train("qwen3-moe", batch=grouped(0), metadata={"advantage": "rloo"}, **settings)
    both = new_job("qwen3-moe", batch=grouped(0), metadata={"advantage": "rloo"}, **settings, **TWO, expert_parallel=2)
    train_on_two([both])
    assert_same(both, alone)


def test_what_the_base_model_says_of_the_canary_is_asked_once_before_anybody_waits_for_the_last_gradients(
    train: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = CanaryProbe.begin

    def heard(canary_probe: CanaryProbe) -> None:
        logging.getLogger("infra").info("canary")
        begin(canary_probe)

    monkeypatch.setattr(CanaryProbe, "begin", heard)
    caplog.set_level(logging.INFO, "infra")
    train(num_minibatches=2, max_tokens_per_microbatch=60)
    said = [message.split("  ")[0] for message in caplog.messages if message.startswith(("micro-batch", "canary"))]
    # A loss is waited for when the next micro-batch is under way, the last one's before the gradients are summed up.
    assert said == ["micro-batch 1/2 1/2", "micro-batch 1/2 2/2", "micro-batch 2/2 1/2", "canary", "micro-batch 2/2 2/2"]
