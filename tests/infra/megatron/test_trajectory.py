"""Three steps against plain PyTorch: Hugging Face's model, PEFT's adapters, autograd, AdamW, written here once more."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from infra.megatron.lora.layers import Shard, initialize
from infra.megatron.lora.peft_files import adapter_shapes
from infra.models.architecture import read_architecture

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def reference_loss(net: nn.Module, batch: dict[str, Tensor], temperature: float) -> Tensor:
    """PPO's clipped loss, mean over loss tokens, one sequence after the other."""
    starts, losses = batch["cu_seqlens"].tolist(), []
    for start, end in pairwise(starts):
        tokens = batch["tokens"][start:end]
        logprobs = (net(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        ratio = (logprobs - batch["rollout_logprobs"][start + 1 : end]).exp()
        advantage = batch["advantages"][start + 1 : end]
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        losses.append(loss[batch["loss_mask"][start + 1 : end].bool()])
    return torch.cat(losses).mean()


def with_adapter(base: PreTrainedModel, path: Path, made: Any) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A PEFT model with the trainer's first values, and its adapter parameters by their names in the file."""
    lora = made.job.trainer.lora
    net = get_peft_model(base, LoraConfig(r=lora.rank, lora_alpha=int(lora.alpha), target_modules=list(lora.target_modules)))
    parameters = {name.replace(".default", ""): p for name, p in net.named_parameters() if p.requires_grad}
    shapes = adapter_shapes(read_architecture(path), lora)
    assert {name: tuple(p.shape) for name, p in parameters.items()} == shapes
    initialize([Shard(name, p, None, None, False) for name, p in parameters.items()], shapes, None, seed=0)  # type: ignore[arg-type]
    return net, parameters


@pytest.mark.parametrize(
    ("name", "targets"), [("qwen3", [*ATTENTION, "gate_proj", "up_proj", "down_proj"]), ("qwen3-moe", ATTENTION)]
)
def test_three_steps_are_those_of_hugging_face_peft_and_adamw(
    name: str,
    targets: list[str],
    model: Callable[[str], Path],
    hugging_face: Callable[[Path], PreTrainedModel],
    make_batch: Callable[..., dict[str, Tensor]],
    train: Callable[..., Any],
) -> None:
    settings: dict[str, Any] = {"lora": {"target_modules": targets}, "weight_decay": 0.1, "max_grad_norm": 0.4}
    net = adam = None
    run = None
    parameters: dict[str, nn.Parameter] = {}
    for step in range(3):
        batch = make_batch(seed=step)
        run = train(name, after=run, batch=batch, metadata={"temperature": "0.7"}, **settings)
        if net is None or adam is None:
            net, parameters = with_adapter(hugging_face(model(name)), model(name), run)
            adam = torch.optim.AdamW(parameters.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        adam.zero_grad()
        loss = reference_loss(net, batch, 0.7)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters.values(), 0.4)
        assert norm > 0.4, "clipping must take part in this test"
        adam.step()
        assert run.metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-6)
        assert run.metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert run is not None
    difference = max(float((run.adapter[name] - parameter.detach()).abs().max()) for name, parameter in parameters.items())
    assert difference < 2e-4
