"""A mixture with the real SGLang and the real trainer: routes as recorded, as stored, and as replayed in every row; and a training step with the
engine's experts."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from infra.config import ATTENTION, BatchConfig, RunConfig
from infra.data.packing import packed, serialized
from infra.engines.journal import sample_of
from infra.engines.server import server_process
from infra.megatron.loss.batch import read_batch
from infra.megatron.loss.microbatch import collate, groups_of
from infra.megatron.model import base_weights, build, parallel
from infra.megatron.model.experts.layer import GroupedExperts
from infra.megatron.protocol.job import TrainJob
from infra.models import base_model
from infra.models.architecture import read_architecture
from infra.records import AdapterVersion, PromptBatch
from infra.runs.lineage import base_version
from infra.runs.opening import start_step
from infra.settings import CHECKOUT, settings
from infra.store import routes
from infra.store.files import fresh_folder, path_of, read_json, write
from infra.store.journal import GrowingJournal
from infra.store.layout import StepFolder, Workspace, step_folder
from infra.store.samples import Sample, read_samples
from infra.trainers.resident import PersistentTrainer
from tasks.draw_prompts import draw_prompts
from tasks.roll_out import roll_out

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(1800)]
SAMPLE = """
import sys
from infra.config import EngineConfig, SamplingConfig
from infra.records import AdapterVersion, PromptBatch
from tasks.roll_out import roll_out
types = (EngineConfig, SamplingConfig, PromptBatch, AdapterVersion)
roll_out.fn(*(kind.model_validate_json(text) for kind, text in zip(types, sys.argv[1:], strict=True)))
"""
PATIENCE_S = 1200


@pytest.fixture(scope="module")
def mixture() -> Path:
    settings.cache_clear()
    return base_model.locate("tiny-moe")  # made in the checkout's own workspace, where later test runs find it


def config_of(mixture: Path) -> RunConfig:
    default = RunConfig()
    return default.but(
        name="r",
        model=str(mixture),
        data=default.data.but(num_prompts=4),
        sampling=default.sampling.but(group_size=4, max_output_tokens=24),
        engine=default.engine.but(max_running_requests=1, start_timeout_s=PATIENCE_S, request_timeout_s=PATIENCE_S),
        trainer=default.trainer.but(
            routing_replay=True, share_experts=True, lora=default.trainer.lora.but(target_modules=ATTENTION)
        ),
    )


def killed_in_the_middle(config: RunConfig, prompts: PromptBatch, adapter: AdapterVersion) -> list[Sample]:
    """Kill a rollout -9 when its journal has three samples. Returns those of the journal."""
    path = StepFolder.of(prompts).journal
    arguments = [each.model_dump_json() for each in (config.engine, config.sampling, prompts, adapter)]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    child = subprocess.Popen([sys.executable, "-c", SAMPLE, *arguments], cwd=CHECKOUT, env=environment)
    deadline = time.monotonic() + PATIENCE_S
    while len(GrowingJournal(path).new_lines()) < 3:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    child.kill()
    child.wait()
    return [sample_of(line) for line in GrowingJournal(path).new_lines()]


def routes_by_transformers(net: nn.Module, tokens: list[int]) -> Tensor:
    """[tokens, layers, experts of a token], the likeliest first."""
    with torch.no_grad():
        logits = net(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(2).indices for layer in logits], 1)


def job_of(config: RunConfig, model: Path, samples: list[Sample], folder: Path) -> TrainJob:
    """The first step of an adapter with these samples."""
    about = {"adapter_version": "0", "adapter_sha256": "base", "temperature": "1.0"}
    return TrainJob(
        model_path=model,
        base_model_id="tiny-moe",
        adapter_path=None,
        adapter_version=0,
        adapter_sha256="base",
        num_optimizer_steps=0,
        batch_path=write(folder / "batch.safetensors", serialized(packed(samples, BatchConfig()), about)),
        output_dir=fresh_folder(folder / "adapter"),
        result_path=folder / "result.json",
        seed=0,
        num_threads=1,
        device="cpu",
        trainer=config.trainer,
    )


def replayed(config: RunConfig, model: Path, samples: list[Sample]) -> tuple[Tensor, list[tuple[int, slice, Tensor]]]:
    """Run the trainer's model over a batch of these samples. Returns the experts of each row [rows, layers, experts of a token], and of each
    sample that has rows of its own its index, the tokens that these are of, and the rows."""
    job = job_of(config, model, samples, fresh_folder(settings().workspace / "job"))
    batch, a, layout = read_batch(job.batch_path), read_architecture(model), parallel.start(job)
    net = build.build(a, job.trainer.but(share_experts=False), layout)
    base_weights.load_base(net, model, a, layout)
    order = [s for group in groups_of(batch, range(batch.num_sequences)) for s in group]
    micro = collate(batch, order, torch.ones(len(batch.tokens)), multiple=1, device=layout.device)
    seen: list[Tensor] = []
    for module in net.modules():
        if isinstance(module, GroupedExperts):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[2].clone()))
    with torch.no_grad():
        build.logits_of(net, micro)
    parallel.stop()
    tree = batch.tree(order)
    owners = [
        (s, slice(shared, length), torch.from_numpy(rows)[shared:])
        for s, shared, length, rows in zip(order, tree.shared, tree.lengths, tree.paths(), strict=True)
    ]
    return torch.stack(seen, 1), owners


@pytest.mark.usefixtures("ends_real_programs")
def test_the_trainer_replays_the_engine_s_routes_in_every_row_and_a_killed_rollout_keeps_them(mixture: Path) -> None:
    config = config_of(mixture)
    adapter = base_version(config)
    prompts = draw_prompts.fn(config.training, start_step(config, 0), adapter)
    before = killed_in_the_middle(config, prompts, adapter)
    rollouts = roll_out.fn(config.engine, config.sampling, prompts, adapter)
    samples = read_samples(path_of(rollouts.file))
    by_key = {(sample.prompt_id, sample.sample_index): sample for sample in samples}
    assert 3 <= len(before) < len(samples) == 16
    assert read_json(step_folder(prompts) / "measures/roll_out.json")["num_kept"] == len(before)
    assert all(each.routes and each.routes == by_key[each.prompt_id, each.sample_index].routes for each in before)

    recorded = [torch.from_numpy(routes.parsed(sample.routes or b"")) for sample in samples]
    peer = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32, attn_implementation="eager")
    for sample, found in zip(samples, recorded, strict=True):
        tokens = [*sample.prompt_tokens, *sample.output_tokens]
        assert found.dtype is torch.uint8 and len(found) == len(tokens) - 1
        assert torch.equal(found.long(), routes_by_transformers(peer, tokens)[:-1])

    # Of four experts the two others, which no router chooses: rows that have them have replayed them.
    others = [torch.ones(*found.shape[:2], 4).scatter_(-1, found.long(), 0).topk(2).indices.to(torch.uint8) for found in recorded]
    foreign = [
        replace(sample, advantage=1.0, routes=routes.serialized(rows.numpy()))
        for sample, rows in zip(samples, others, strict=True)
    ]
    for given, wanted in ((samples, recorded), (foreign, others)):
        experts, owners = replayed(config, mixture, given)
        num_rows = 0
        for s, span, rows in owners:
            assert torch.equal(experts[rows], wanted[s][span].long())
            num_rows += len(rows)
        assert num_rows == len(experts) > 200

    # A training step with the experts that the engine holds, and one without, when it has ended.
    assert server_process.recorded()
    first, second = (job_of(config, mixture, samples, fresh_folder(settings().workspace / name)) for name in ("with", "without"))
    first = first.model_copy(update={"shared_experts": Workspace.here().shared_experts})
    with_engine = PersistentTrainer().train(first, first.result_path.parent)
    assert "experts: those of the engine's process" in (first.result_path.parent / "trainer.log").read_text()
    server_process.stop_recorded()
    without = PersistentTrainer().train(second, second.result_path.parent)
    assert "experts: read from" in (second.result_path.parent / "trainer.log").read_text()
    assert with_engine.metrics["train/loss"] == without.metrics["train/loss"]
    digests = [{name: digest.sha256 for name, digest in result.files.items()} for result in (with_engine, without)]
    assert digests[0] == digests[1] and digests[0]
