"""Replayed routes: each row of a mixture goes to the experts that the batch names, in every pass and layout; shares stay the router's own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infra.megatron.checkpoint import save as checkpoint
from infra.megatron.lora import layers as lora
from infra.megatron.loss.batch import Batch, read_batch
from infra.megatron.loss.logprobs import token_logprobs
from infra.megatron.loss.microbatch import MicroBatch, collate, groups_of
from infra.megatron.loss.reference_logprobs import with_policies
from infra.megatron.model import base_weights, build, parallel
from infra.megatron.model.experts.layer import GroupedExperts
from infra.megatron.program import optimizer
from infra.models.architecture import read_architecture

NUM_LAYERS, NUM_EXPERTS, PER_TOKEN = 2, 8, 2
NewJob = Callable[..., Any]
Tensors = dict[str, Tensor]
MakeTree = Callable[..., Tensors]
REPLAY = {"routing_replay": True}
SEQUENCE = {"num_processes": 2, "tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data parallel, small micro-batches": {"num_processes": 2, "max_tokens_per_microbatch": 45},
    "expert parallel": {"num_processes": 2, "expert_parallel": 2},
    "sequence parallel": SEQUENCE,
    "sequence and expert parallel, recomputed": SEQUENCE | {"expert_parallel": 2, "recompute": True},
}


def random_routes(num_tokens: int, seed: int = 0) -> Tensor:
    """Distinct experts of each token and layer, in any order."""
    scores = torch.rand(num_tokens, NUM_LAYERS, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.topk(PER_TOKEN).indices.to(torch.uint8)


@pytest.fixture
def tree(make_tree: MakeTree) -> Tensors:
    tensors = make_tree()
    return tensors | {"routes": random_routes(len(tensors["tokens"]))}


@contextmanager
def seen_experts(net: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Collects by layer what experts the rows are sent to, in each pass."""
    seen: list[list[Tensor]] = [[] for _ in range(NUM_LAYERS)]
    mixtures = [module for module in net.modules() if isinstance(module, GroupedExperts)]

    def watch(layer: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, inputs: seen[layer].append(inputs[2].detach().clone())

    hooks = [module.register_forward_pre_hook(watch(layer)) for layer, module in enumerate(mixtures)]
    yield seen
    for hook in hooks:
        hook.remove()


def loaded(job: Any) -> tuple[nn.Module, parallel.ParallelContext]:
    a, layout = read_architecture(job.model_path), parallel.start(job)
    net = build.build(a, job.trainer, layout)
    base_weights.load_base(net, job.model_path, a, layout)
    shards = lora.attach(net, a, job.trainer.lora, layout, sequence_parallel=False)
    checkpoint.load(job, a, shards, optimizer.build(shards, job.trainer), layout)
    return net, layout


def collated(batch: Batch, multiple: int = 1) -> tuple[MicroBatch, list[int]]:
    """All sequences in one micro-batch, those of a group sorted, and their order."""
    useful = [s for s in range(batch.num_sequences) if batch.num_loss_tokens(s)]
    order = [s for group in groups_of(batch, useful) for s in group]
    return collate(batch, order, torch.ones(len(batch.tokens)), multiple=multiple, device=torch.device("cpu")), order


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-moe-raw"])
def test_every_row_goes_to_the_experts_of_the_batch_also_when_it_is_recomputed(
    name: str, recompute: bool, new_job: NewJob, tree: Tensors
) -> None:
    job = new_job(name, batch=tree, recompute=recompute, **REPLAY).job
    batch = read_batch(job.batch_path)
    assert batch.routes is not None
    net, layout = loaded(job)
    micro, order = collated(batch, multiple=64)
    with seen_experts(net) as seen:
        logprobs, _ = token_logprobs(build.logits_of(net, micro), micro.targets, temperature=1.0, group=layout.tp_group)
        logprobs.sum().backward()
    shared, checked, padding = batch.tree(order), torch.zeros(micro.tokens.shape[1], dtype=torch.bool), 0
    for i, (s, path) in enumerate(zip(order, shared.paths(), strict=True)):
        own = torch.from_numpy(path)[shared.shared[i] :]
        expected = batch.routes[batch.starts[s] + shared.shared[i] : batch.starts[s] + shared.lengths[i]].long()
        for layer, passes in enumerate(seen):
            assert len(passes) == 1 + recompute
            assert all(torch.equal(experts[own], expected[:, layer]) for experts in passes)
        checked[own] = True
    padding = int((~checked).sum())
    assert micro.num_rows == int(checked.sum()) and padding > 0, "no row but padding is left to the router"
    with seen_experts(net) as chosen:  # which it chooses as ever
        build.logits_of(net, collated(read_batch(job.batch_path))[0])
    assert all(len(passes) == 1 for passes in chosen)


@pytest.fixture
def own_routes(new_job: NewJob, make_tree: MakeTree) -> Tensors:
    """A batch with the routes that the trainer's own router chooses: of each sequence by itself, the last token's too."""
    tensors = make_tree()
    job = new_job("qwen3-moe", batch=tensors).job
    batch = read_batch(job.batch_path)
    net, _ = loaded(job)
    routes = torch.zeros(len(batch.tokens), NUM_LAYERS, PER_TOKEN, dtype=torch.uint8)
    for s in range(batch.num_sequences):
        if batch.num_loss_tokens(s):
            micro = collate(batch, [s], torch.ones(len(batch.tokens)), multiple=1, device=torch.device("cpu"))
            with seen_experts(net) as seen, torch.no_grad():
                build.logits_of(net, micro)
            for layer, (experts,) in enumerate(seen):
                routes[batch.starts[s] : batch.starts[s] + len(experts), layer] = experts.to(torch.uint8)
    parallel.stop()
    return tensors | {"routes": routes}


def test_its_own_routes_change_nothing_and_one_other_expert_does(train: NewJob, own_routes: Tensors) -> None:
    plain = train("qwen3-moe", batch={name: tensor for name, tensor in own_routes.items() if name != "routes"})
    replayed = train("qwen3-moe", batch=own_routes, **REPLAY)
    off = train("qwen3-moe", batch=own_routes)
    assert off.metrics == plain.metrics, "without routing_replay a batch's routes are not read"
    assert replayed.metrics == pytest.approx(plain.metrics, rel=1e-5, abs=1e-6)
    other = own_routes["routes"].clone()
    token = int(own_routes["cu_seqlens"][1]) - 2  # it predicts the last token of the first sequence, and is its alone
    free = next(e for e in range(NUM_EXPERTS) if e not in other[token, 0].tolist())
    other[token, 0, 0] = free
    perturbed = train("qwen3-moe", batch=own_routes | {"routes": other}, **REPLAY)
    assert perturbed.metrics["train/loss"] != pytest.approx(plain.metrics["train/loss"], rel=1e-4)


def test_the_policy_before_the_step_replays_and_the_base_model_does_not(
    new_job: NewJob, tree: Tensors, own_routes: Tensors
) -> None:
    loss = {"kl": {"coefficient": 0.1}, "correction": {"mode": "decoupled", "kind": "tis"}}
    found = []
    for tensors in (own_routes, tree):
        job = new_job("qwen3-moe", batch=tensors, loss=loss, num_minibatches=2, **REPLAY).job
        batch = read_batch(job.batch_path)
        net, layout = loaded(job)
        found.append(with_policies(net, batch, [collated(batch)[1]], job.trainer, layout))
        parallel.stop()
    own, random = found
    assert own.reference_logprobs is not None and random.reference_logprobs is not None
    assert own.old_logprobs is not None and random.old_logprobs is not None
    assert torch.equal(own.reference_logprobs, random.reference_logprobs)
    assert not torch.allclose(own.old_logprobs, random.old_logprobs, atol=1e-3)
    assert torch.allclose(own.old_logprobs, own.reference_logprobs, atol=1e-5), "an adapter that is zero"


@pytest.fixture(scope="session")
def by_layout(train: NewJob, new_job: NewJob, train_on_two: Callable[..., None], make_tree: MakeTree) -> dict[str, Any]:
    """Sequences that begin alike have equal routes there: which of them a shared row belongs to depends on the micro-batches."""
    tensors = make_tree()
    tensors |= {"routes": random_routes(512)[tensors["tokens"]]}
    found = {name: new_job("qwen3-moe", batch=tensors, **REPLAY, **layout) for name, layout in LAYOUTS.items()}
    train_on_two(list(found.values()))
    return found | {"alone": train("qwen3-moe", batch=tensors, **REPLAY)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_replays_the_same_routes(name: str, by_layout: dict[str, Any]) -> None:
    assert by_layout[name].metrics == pytest.approx(by_layout["alone"].metrics, rel=2e-5, abs=1e-6)


def changed_routes(tensors: Tensors, change: Callable[[Tensor], Tensor]) -> Tensors:
    return tensors | {"routes": change(tensors["routes"])}


BAD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "another number of experts": (lambda routes: routes[..., :1].contiguous(), "2, 1], should be torch.uint8 ["),
    "a layer too few": (lambda routes: routes[:, :1].contiguous(), "1, 2], should be torch.uint8 ["),
    "a row too few": (lambda routes: routes[1:].contiguous(), "lengths disagree: routes"),
    "wider numbers": (lambda routes: routes.to(torch.int16), "routes are torch.int16 ["),
    "no such expert": (lambda routes: routes + 1, "routes are 1 to 8, the model has the experts 0 to 7"),
}


@pytest.mark.parametrize("kind", BAD)
def test_routes_that_are_not_of_this_model_are_refused(
    kind: str, new_job: NewJob, tree: Tensors, refused: Callable[..., str]
) -> None:
    change, message = BAD[kind]
    assert message in refused(new_job("qwen3-moe", batch=changed_routes(tree, change), **REPLAY))


def test_a_batch_without_routes_and_a_model_without_experts_are_refused(
    new_job: NewJob, tree: Tensors, make_tree: MakeTree, refused: Callable[..., str]
) -> None:
    assert "has no routes, trainer.routing_replay needs them" in refused(new_job("qwen3-moe", batch=make_tree(), **REPLAY))
    assert "it is no mixture of experts" in refused(new_job("qwen3", batch=tree, **REPLAY))
