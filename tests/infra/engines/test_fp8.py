"""An engine with 8-bit floats: where it is refused, what corrects its samples, and with which flags and tolerances it runs."""

from itertools import pairwise
from math import prod
from typing import Any

import pytest
from shared import DENSE_7B

from infra.colocation import engine_memory, plans, trainer_memory
from infra.colocation.machine import Machine
from infra.colocation.trainer_memory import Model
from infra.config import EngineConfig, RunConfig, TrainerConfig
from infra.engines import check_config, health_checks, open_engine
from infra.engines.checked import CheckedEngine
from infra.machine import devices, nvml
from infra.models.architecture import base_shapes, parse_architecture
from infra.records import AdapterVersion, BaseModelRef

GIB = 2**30
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
SINGLY = [{name: "fp8"} for name in FP8]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    monkeypatch.setattr(nvml, "numbers", lambda: (0,))
    monkeypatch.setattr(devices, "gpu_versions", lambda numbers=(): {})
    monkeypatch.setattr(nvml, "name", lambda number: "NVIDIA A100")
    monkeypatch.setattr(nvml, "compute_capability", lambda number: (8, 0))


def version(base: BaseModelRef) -> AdapterVersion:
    return AdapterVersion(run="r", version=0, base=base, rank=4, alpha=8, target_modules=("q_proj",), seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "vllm", "quantization": "fp8"}, "engine.quantization 'fp8' with engine.kind 'vllm' is not supported"),
        ({"kind": "vllm", "kv_cache_dtype": "fp8"}, "engine.kv_cache_dtype 'fp8' with engine.kind 'vllm' is not supported"),
        ({"quantization": "fp8", "lora_mode": "merged"}, "with lora_mode 'merged'"),
        ({"quantization": "fp8", "colocation": "reload"}, "with colocation 'reload'"),
        ({"extra_flags": ("--quantization", "fp8")}, "set engine.quantization"),
        ({"extra_flags": ("--kv-cache-dtype=fp8_e4m3",)}, "set engine.kv_cache_dtype"),
    ],
)
def test_what_cannot_be_with_fp8_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**changes)


@pytest.mark.parametrize("field", FP8)
def test_fp8_without_a_gpu_or_on_an_older_one_is_refused(field: str, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig.model_validate({field: "fp8"})
    with pytest.raises(ValueError, match=f"engine.{field} 'fp8' on NVIDIA A100: its compute capability is 8.0, .* 8.9 or higher"):
        check_config(config, "offload")
    monkeypatch.setattr(nvml, "compute_capability", lambda number: (9, 0))
    check_config(config, "offload")
    monkeypatch.setattr(devices, "device", lambda: "cpu")
    with pytest.raises(ValueError, match=f"engine.{field} 'fp8' needs a GPU"):
        check_config(config, "keep_weights")


@pytest.mark.parametrize("field", FP8)
def test_samples_of_fp8_are_corrected_unless_the_run_says_how(field: str) -> None:
    assert RunConfig().trainer.loss.correction.kind == "none"
    config = RunConfig.model_validate({"engine": {field: "fp8"}})
    correction = config.trainer.loss.correction
    assert (correction.kind, correction.mode) == ("tis", "decoupled")
    assert RunConfig.model_validate(config.model_dump()) == config
    asked = {"kind": "icepop", "mode": "decoupled", "cap": 5.0}
    own = RunConfig.model_validate({"engine": {field: "fp8"}, "trainer": {"loss": {"correction": asked}}})
    assert own.trainer.loss.correction.kind == "icepop" and own.trainer.loss.correction.cap == 5.0


def test_weights_and_cache_have_flags_of_their_own_and_each_is_another_engine(base: BaseModelRef, gpu: None) -> None:
    def engine(**changes: str) -> Any:
        return open_engine(EngineConfig(dtype="float32").model_copy(update=changes), version(base))

    weights, cache, neither = engine(quantization="fp8"), engine(kv_cache_dtype="fp8"), engine()
    assert ("--quantization", "fp8") in pairwise(weights.flags) and "--kv-cache-dtype" not in weights.flags
    assert ("--kv-cache-dtype", "fp8_e4m3") in pairwise(cache.flags) and "--quantization" not in cache.flags
    assert len({weights.identity, cache.identity, neither.identity}) == 3


def test_weights_that_sglang_would_not_cast_again_are_not_dropped() -> None:
    architecture = parse_architecture(dict(DENSE_7B))
    model, trainer = Model(2 * sum(map(prod, base_shapes(architecture).values())), architecture), TrainerConfig()
    chosen = {}
    for quantization in ("none", "fp8"):
        engine = EngineConfig(quantization=quantization)
        # The trainer fits beside a sleeping engine, not beside one that keeps its weights.
        need = (
            trainer_memory.trainer_peak_bytes(trainer, model)
            + trainer_memory.TRAINING_SLACK_BYTES
            + engine_memory.residue_bytes("reload", engine, model)
        )
        machine = Machine(is_gpu=True, gpu_bytes=need + GIB, is_split=False, host_bytes=512 * GIB)
        chosen[quantization] = plans.choose(engine, trainer, model, machine)
    assert chosen["none"].colocation == "reload"
    assert chosen["fp8"].colocation == "offload" and "would not cast weights that it reads again" in chosen["fp8"].reason


def test_a_release_of_fp8_weights_need_not_free_as_much() -> None:
    architecture = parse_architecture(dict(DENSE_7B))
    model = Model(2 * sum(map(prod, base_shapes(architecture).values())), architecture)
    freed = [
        engine_memory.freed_bytes("offload", EngineConfig(dtype="bfloat16").but(**changes), model, 1000)
        for changes in ({}, *SINGLY, FP8)
    ]
    cache = engine_memory.kv_cache_bytes(EngineConfig(dtype="bfloat16"), architecture, 1000)
    weights = freed[0] - cache
    assert freed == [weights + cache, weights // 2 + cache, weights + cache // 2, weights // 2 + cache // 2]


def test_the_canary_of_fp8_may_be_as_far_from_the_trainers_as_was_measured(base: BaseModelRef, gpu: None) -> None:
    engine = open_engine(EngineConfig(dtype="bfloat16"), version(base))
    quantized = open_engine(EngineConfig(dtype="bfloat16", quantization="fp8"), version(base))
    assert isinstance(engine, CheckedEngine) and isinstance(quantized, CheckedEngine)
    assert (engine._precision, quantized._precision) == ("bfloat16", "fp8")
    assert 0.58 < health_checks.TOLERANCE_NATS["fp8"] < 3, "random weights of 7B are that far, a doubled norm further"
    assert health_checks.SAME_SERVER_NATS["fp8"] == health_checks.SAME_SERVER_NATS["bfloat16"]


def test_experts_with_adapters_are_not_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "passed_over", lambda *arguments: ("gate_proj", "up_proj"))
    config = RunConfig.model_validate({"engine": {"quantization": "fp8"}})
    with pytest.raises(
        ValueError, match=r"engine\.quantization 'fp8' with trainer\.lora\.target_modules gate_proj, up_proj of experts"
    ):
        plans.check_quantization(config, parse_architecture(dict(DENSE_7B)))
    plans.check_quantization(RunConfig(), parse_architecture(dict(DENSE_7B)))


def test_every_precision_has_all_tolerances() -> None:
    tolerances = (health_checks.TOLERANCE_NATS, health_checks.SAME_SERVER_NATS, health_checks.VISIBLE_NATS)
    assert {frozenset(each) for each in tolerances} == {frozenset(("float32", "bfloat16", "fp8"))}
