"""What trainer.routing_replay and trainer.share_experts set in the engine, and what they do not go with."""

import pytest

from infra.config import RunConfig
from infra.config.mixtures import refused_flags
from infra.config.tools.overrides import changed

REPLAY = "trainer.routing_replay=true"
DECOUPLED = '"mode": "decoupled", "kind": "tis"'
REFUSED = {
    "engine.kind 'vllm'": ["engine.kind=vllm"],
    "engine.kind 'scripted'": ["engine.kind=scripted"],
    "environment '/x.py:Game'": ["environment.name=/x.py:Game", "evaluation.every=0"],
    "data.partial_rollouts true": [
        "engine.deterministic=false",
        "data.partial_rollouts=true",
        "data.num_oversampled_prompts=2",
        f"trainer.loss.correction={{{DECOUPLED}}}",
    ],
    "trainer.loss.correction.in_flight_updates true": [
        f'trainer.loss.correction={{{DECOUPLED}, "max_staleness": 1, "in_flight_updates": true}}'
    ],
    "engine.extra_flags '--enable-hierarchical-cache'": ['engine.extra_flags=["--enable-hierarchical-cache"]'],
    "engine.extra_flags '--moe-runner-backend triton_kernel'": ['engine.extra_flags=["--moe-runner-backend", "triton_kernel"]'],
}

SHARED = "trainer.share_experts=true"
UNSHARED = {
    "engine.kind 'vllm'": ["engine.kind=vllm"],
    "engine.colocation 'offload'": ["engine.colocation=offload"],
    "engine.colocation 'separate_gpus'": ["engine.colocation=separate_gpus"],
    "engine.quantization 'fp8'": ["engine.quantization=fp8"],
    "engine.lora_mode 'merged'": ["engine.lora_mode=merged"],
    "engine.dtype 'bfloat16' and trainer.dtype 'auto'": ["engine.dtype=bfloat16"],
    "trainer.mode 'per_step'": ["trainer.mode=per_step"],
    "engine.replicas 2": ["engine.replicas=2"],
    "engine.replicas auto": ["engine.replicas=null"],
    "engine.tensor_parallel 2": ["engine.tensor_parallel=2"],
    "trainer.num_processes 2": ["trainer.num_processes=2"],
    "engine.extra_flags '--moe-runner-backend triton_kernel'": ['engine.extra_flags=["--moe-runner-backend", "triton_kernel"]'],
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_routes_or_wrong_ones_is_refused_by_name(what: str) -> None:
    changed(RunConfig(), REFUSED[what])
    with pytest.raises(ValueError) as error:
        changed(RunConfig(), [*REFUSED[what], REPLAY])
    assert f"trainer.routing_replay true with {what} is not supported: " in str(error.value)


@pytest.mark.parametrize("what", UNSHARED)
def test_experts_that_cannot_be_shared_are_refused_by_name(what: str) -> None:
    changed(RunConfig(), UNSHARED[what])
    with pytest.raises(ValueError) as error:
        changed(RunConfig(), [*UNSHARED[what], SHARED])
    assert f"trainer.share_experts true with {what} is not supported: " in str(error.value)
    assert changed(RunConfig(), [SHARED]).engine.share_experts and not RunConfig().engine.share_experts


@pytest.mark.parametrize(
    ("flags", "num_refused"),
    [
        (["--moe-runner-backend", "triton"], 0),
        (["--moe-runner-backend=triton"], 0),
        (["--moe_runner_backend=auto"], 1),
        (["--moe-runner", "flashinfer_trtllm"], 1),
        (["--moe-runner-backend"], 1),
        (["--enable-hier"], 1),
        (["--speculative-algorithm", "EAGLE", "--moe-a2a-backend", "deepep"], 2),
        (["--enable-lmcache"], 1),
        (["--radix-cache-backend", "mine"], 1),
        (["--attention-backend", "triton"], 0),
    ],
)
def test_a_flag_is_known_however_it_is_spelt(flags: list[str], num_refused: int) -> None:
    assert len(list(refused_flags(flags))) == num_refused


def test_the_engine_records_what_the_trainer_replays_and_nothing_else() -> None:
    assert not RunConfig().trainer.routing_replay and not RunConfig().engine.record_routes
    config = changed(RunConfig(), [REPLAY])
    assert config.engine.record_routes
    assert config.but(num_steps=3).engine.record_routes
    assert not config.but(trainer=RunConfig().trainer).engine.record_routes
    assert not changed(RunConfig(), ["engine.record_routes=true"]).engine.record_routes
