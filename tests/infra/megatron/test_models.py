"""The trainer's model against Hugging Face's, and its adapters against PEFT's."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from infra.megatron.loss.batch import read_batch
from infra.megatron.loss.microbatch import collate, groups_of
from infra.megatron.model import base_weights, parallel
from infra.megatron.model import build as model_module
from infra.megatron.model.rotary import Rotary
from infra.megatron.program.token_logprobs import of_all_tokens
from infra.models import architecture

NAMES = ["qwen3", "qwen3-untied", "qwen2", "llama", "llama3.1", "qwen3-moe", "qwen3-moe-raw"]


@pytest.fixture
def started(new_job: Callable[..., Any]) -> Iterator[parallel.ParallelContext]:
    yield parallel.start(new_job().job)
    parallel.stop()


def logprobs_of(net: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Of tokens[1:] given what stands before."""
    with torch.no_grad():
        logits = net(torch.tensor([tokens])).logits[0, :-1]
    logprobs: Tensor = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return logprobs


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_packed_sequences_are_those_of_hugging_face(
    name: str,
    model: Callable[[str], Path],
    hugging_face: Callable[[Path], PreTrainedModel],
    started: parallel.ParallelContext,
    new_job: Callable[..., Any],
    make_tree: Callable[..., dict[str, Tensor]],
) -> None:
    made = new_job(name, batch=make_tree())
    a, read = architecture.read_architecture(model(name)), of_all_tokens(read_batch(made.job.batch_path))
    net = model_module.build(a, made.job.trainer, started)
    base_weights.load_base(net, model(name), a, started)
    order = [s for group in groups_of(read, range(read.num_sequences)) for s in group]
    micro = collate(read, order, torch.zeros_like(read.advantages), multiple=1, device=started.device)
    assert micro.num_rows < len(micro.loss_tokens), "what the sequences have in common is computed once"
    with torch.no_grad():
        logits = model_module.logits_of(net, micro)
    reference = hugging_face(model(name))
    with torch.no_grad():
        expected = torch.cat([reference(read.tokens[read.span(s)][None]).logits[0, :-1] for s in order])
    assert (logits - expected).abs().max() < 1e-5
    assert expected.abs().max() > 1


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_adapter_gives_the_same_logprobs_in_peft(
    name: str, model: Callable[[str], Path], hugging_face: Callable[[Path], PreTrainedModel], train: Callable[..., Any]
) -> None:
    made = train(name)
    canary, reference = made.canary, hugging_face(model(name))
    before = logprobs_of(reference, canary.tokens)
    after = logprobs_of(PeftModel.from_pretrained(reference, made.job.output_dir), canary.tokens)
    assert (before - torch.tensor(canary.base_logprobs)).abs().max() < 1e-5
    assert (after - torch.tensor(canary.adapter_logprobs)).abs().max() < 1e-5
    assert (after - before).abs().max() > 0.1


def test_scaled_frequencies_are_those_of_hugging_face(
    hugging_face: Callable[[Path], PreTrainedModel], model: Callable[[str], Path]
) -> None:
    a, reference = architecture.read_architecture(model("llama3.1")), hugging_face(model("llama3.1"))
    found = Rotary(a.head_dim, a.rope_theta, torch.float32, torch.device("cpu"), a.rope_scaling).frequencies
    torch.testing.assert_close(found, reference.get_submodule("model.rotary_emb").inv_freq)
    ratio = found * a.rope_theta ** (torch.arange(0, 16, 2) / 16)
    assert (ratio > 0.99).sum() == 3
    assert (ratio < 0.126).sum() == 4


def test_an_adapter_of_a_few_projections_gives_the_same_logprobs_in_peft(
    model: Callable[[str], Path], hugging_face: Callable[[Path], PreTrainedModel], train: Callable[..., Any]
) -> None:
    made = train(lora={"rank": 4, "alpha": 8, "target_modules": ["v_proj", "q_proj", "up_proj"]})
    assert {name.split(".")[-3] for name in made.adapter} == {"q_proj", "v_proj", "up_proj"}
    canary = made.canary
    after = logprobs_of(PeftModel.from_pretrained(hugging_face(model("qwen3")), made.job.output_dir), canary.tokens)
    assert (after - torch.tensor(canary.adapter_logprobs)).abs().max() < 1e-5


def test_the_canary_is_the_first_sequence_cut_to_256_tokens(make_batch: Callable[..., Any], train: Callable[..., Any]) -> None:
    long = make_batch(seed=3, num_sequences=2, max_tokens=500)
    assert long["cu_seqlens"][1] > 256
    canary = train(batch=long).canary
    assert canary.tokens == long["tokens"][:256].tolist()
    assert len(canary.base_logprobs) == len(canary.adapter_logprobs) == 255


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_the_base_model_says_the_same_of_the_canary_whatever_was_learnt(name: str, train: Callable[..., Any]) -> None:
    first = train(name, num_minibatches=2)
    second = train(name, num_minibatches=2, after=first)
    assert second.canary.base_logprobs == first.canary.base_logprobs
    assert second.canary.adapter_logprobs != first.canary.adapter_logprobs
