"""Which plan is chosen for which machine, model and layout. Shapes and sizes are those of models that were run on H200s."""

from math import prod
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from pydantic import ValidationError
from shared import DENSE_7B, QWEN_COMMON

from infra.colocation import engine_memory, host_memory, plans, trainer_memory
from infra.colocation.machine import Machine
from infra.colocation.trainer_memory import Model, trainer_peak_bytes
from infra.config import ATTENTION, EngineConfig, LoraConfig, RunConfig, TrainerConfig
from infra.machine import devices, nvml
from infra.machine.nvml import GIB
from infra.megatron.protocol.job import TrainJob
from infra.models.architecture import base_shapes, parse_architecture
from infra.settings import Settings, settings
from infra.trainers import torchrun

MIXTURE_30B = {
    **QWEN_COMMON,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
}
H200 = Machine(is_gpu=True, gpu_bytes=int(139.8 * GIB), is_split=False, host_bytes=125 * GIB)


@pytest.fixture(autouse=True)
def _on_a_gpu(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    monkeypatch.setattr(devices, "processor", lambda: "NVIDIA H200")


def model(fields: dict[str, object]) -> Model:
    architecture = parse_architecture(dict(fields))
    return Model(2 * sum(map(prod, base_shapes(architecture).values())), architecture)


def trainer(microbatch: int, **changes: object) -> TrainerConfig:
    return TrainerConfig(max_tokens_per_microbatch=microbatch, lora=LoraConfig(rank=16, alpha=16)).but(**changes)


def on_attention(microbatch: int, **changes: object) -> TrainerConfig:
    return trainer(microbatch, lora=LoraConfig(rank=16, alpha=16, target_modules=ATTENTION), **changes)


@pytest.mark.parametrize(
    ("fields", "rank", "microbatch", "recompute", "measured_gib"),
    [
        (DENSE_7B, 16, 8192, False, 56.6),
        (DENSE_7B, 16, 16384, False, 97.9),
        (DENSE_7B, 16, 8192, True, 23.1),
        (MIXTURE_30B, 8, 8192, False, 100.4),
        (MIXTURE_30B, 8, 16384, False, 136.7),
    ],
)
def test_the_trainers_peak_is_estimated_as_it_was_measured(
    fields: dict[str, object], rank: int, microbatch: int, recompute: bool, measured_gib: float
) -> None:
    config = trainer(microbatch, recompute=recompute, lora=LoraConfig(rank=rank, alpha=16))
    estimated = trainer_peak_bytes(config, model(fields)) / GIB
    assert measured_gib - trainer_memory.TRAINING_SLACK_BYTES / GIB - 1 < estimated < measured_gib + 6


@pytest.mark.parametrize(
    ("fields", "config", "gpu_gib", "plan", "because"),
    [
        (
            DENSE_7B,
            trainer(16384),
            139.8,
            "keep_weights",
            "102 GiB of a GPU with 140 GiB, beside it the engine can keep its 17 GiB",
        ),
        (MIXTURE_30B, on_attention(8192), 139.8, "reload", "the engine's 63 GiB do not fit beside it"),
        (
            MIXTURE_30B,
            trainer(8192),
            139.8,
            "offload",
            "SGLang would not read experts with adapters again: its weights are copied",
        ),
        (DENSE_7B, trainer(8192), 79.6, "keep_weights", "only the KV cache is released"),
        (DENSE_7B, trainer(8192), 70, "reload", "weights are dropped and read again from disk"),
        (DENSE_7B, trainer(8192), 63, "restart", "not even the 3 GiB of a sleeping engine fit beside it"),
        (DENSE_7B, trainer(8192, recompute=True), 79.6, "keep_weights", "33 GiB"),
        (MIXTURE_30B, on_attention(16384, num_processes=2, expert_parallel=2), 139.8, "reload", "101 GiB"),
    ],
)
def test_the_cheapest_plan_that_fits_is_chosen_and_says_why(
    fields: dict[str, object], config: TrainerConfig, gpu_gib: float, plan: str, because: str
) -> None:
    machine = H200._replace(gpu_bytes=int(gpu_gib * GIB))
    chosen = plans.choose(EngineConfig(), config, model(fields), machine)
    assert (chosen.colocation, because in chosen.reason) == (plan, True), chosen


def test_tensor_parallelism_of_the_engine_makes_room_for_resident() -> None:
    config = on_attention(8192)
    assert plans.choose(EngineConfig(), config, model(MIXTURE_30B), H200).colocation == "reload"
    assert plans.choose(EngineConfig(tensor_parallel=2), config, model(MIXTURE_30B), H200).colocation == "keep_weights"


def test_replicas_that_share_a_gpu_each_keep_their_own_there_and_a_copy_on_the_host() -> None:
    engine, config, dense = EngineConfig(replicas=2, memory_fraction=0.4), trainer(8192), model(DENSE_7B)
    alone = H200._replace(gpu_bytes=int(79.6 * GIB))
    shared = alone._replace(replicas_per_gpu=2)
    assert plans.choose(engine, config, dense, alone).colocation == "keep_weights"
    assert plans.choose(engine, config, dense, shared).colocation == "reload"
    kept = engine_memory.residue_bytes("keep_weights", engine, dense)
    left = [plans.left_to_trainer_bytes(engine.but(colocation="keep_weights"), dense, each) for each in (alone, shared)]
    assert left[0] - left[1] == kept
    assert engine_memory.at_work_bytes(engine, shared) == 2 * engine_memory.at_work_bytes(engine, alone)
    parts = plans.host_parts("offload", engine, config.but(mode="per_step"), dense, alone)
    assert parts == {"the sleeping engine's weights": 2 * dense.weight_bytes}


def test_experts_with_adapters_are_never_left_to_be_read_again() -> None:
    mixture, config = model(MIXTURE_30B), trainer(8192)
    without_room = H200._replace(host_bytes=60 * GIB)
    assert plans.choose(EngineConfig(), config, mixture, without_room).colocation == "restart"
    assert plans.choose(EngineConfig(lora_mode="merged"), config, mixture, H200).colocation == "reload"
    assert plans.passed_over(EngineConfig(), config.lora, mixture.architecture) == ("gate_proj", "up_proj", "down_proj")
    assert plans.passed_over(EngineConfig(), config.lora, model(DENSE_7B).architecture) == ()


def test_a_plan_that_moves_experts_says_how_they_could_stay() -> None:
    mixture, advice = (
        model(MIXTURE_30B),
        "; with trainer.share_experts true both would compute with one copy, and none would move",
    )
    assert plans.choose(EngineConfig(), trainer(8192), mixture, H200).reason.endswith(f"copied to the host and back{advice}")
    without_room = H200._replace(host_bytes=60 * GIB)
    assert plans.choose(EngineConfig(), trainer(8192), mixture, without_room).reason.endswith(f"the server ends{advice}")
    no_such = [
        plans.choose(EngineConfig(), on_attention(8192), mixture, H200),  # reads its experts again
        plans.choose(EngineConfig(), trainer(12288, num_processes=2, expert_parallel=2), mixture, H200),
        plans.choose(EngineConfig(), trainer(8192), mixture, H200._replace(gpu_bytes=116 * GIB)),  # too little room for it
    ]
    assert [plan.colocation for plan in no_such] == ["reload", "offload", "offload"]
    assert not any("share_experts" in plan.reason for plan in no_such), no_such


def test_gpus_of_their_own_are_a_split_whatever_fits() -> None:
    assert (
        plans.choose(EngineConfig(), trainer(16384), model(DENSE_7B), H200._replace(is_split=True)).colocation == "separate_gpus"
    )


def test_what_may_be_left_after_a_release_hangs_on_the_plan() -> None:
    left = {
        plan: engine_memory.residue_bytes(plan, EngineConfig(), model(DENSE_7B)) / GIB
        for plan in ("keep_weights", "offload", "reload", "restart")  # type: ignore[var-annotated]
    }
    assert left["offload"] == left["reload"] == pytest.approx(2.65, abs=0.01)  # with slots for two adapters
    assert left["keep_weights"] == pytest.approx(left["offload"] + 14.19, abs=0.01)
    assert left["restart"] == 0
    tiny_model_s = engine_memory.residue_bytes("reload", EngineConfig(), model(DENSE_7B), kv_cache_tokens=116_667_852) / GIB
    assert 4.9 < tiny_model_s - left["reload"] < 5.5, "5.24 GB by the log of an H200"
    halved = engine_memory.residue_bytes("keep_weights", EngineConfig(tensor_parallel=2), model(DENSE_7B)) / GIB
    assert left["keep_weights"] - halved == pytest.approx(14.19 / 2 - 1.5, abs=0.01)
    assert halved + trainer_memory.MARGIN_BYTES / GIB > 10.7, "of each of two ranks, by the driver of two H200s"


def test_a_plan_that_was_chosen_by_hand_stays(monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
    config = RunConfig(model=str(model_folder))
    monkeypatch.setattr(plans, "this_machine", lambda: H200)
    by_figures = plans.plan(config)
    assert by_figures.colocation == "keep_weights" and "GiB" in by_figures.reason
    assert plans.resolve_colocation(config).engine.colocation == "keep_weights"
    by_hand = config.but(engine=EngineConfig(colocation="offload", max_running_requests=64))
    assert plans.plan(by_hand)[:2] == ("offload", "chosen in engine.colocation")
    assert plans.resolve_colocation(by_hand).engine == by_hand.engine


@pytest.mark.parametrize(
    ("fields", "gpu_gib", "engine", "stays"),
    [
        (DENSE_7B, 139.8, {"colocation": "keep_weights"}, True),  # measured: 114.3 and 16.7 GiB
        (DENSE_7B, 139.8, {"colocation": "keep_weights", "memory_fraction": 0.86}, False),
        (DENSE_7B, 79.6, {"colocation": "reload"}, False),
        (MIXTURE_30B, 139.8, {"colocation": "reload"}, False),
        (DENSE_7B, 139.8, {"colocation": "restart"}, False),
        (MIXTURE_30B, 139.8, {"colocation": "separate_gpus"}, True),
    ],
)
def test_a_sleeping_trainers_weights_stay_on_the_gpu_where_the_engine_leaves_room(
    fields: dict[str, object], gpu_gib: float, engine: dict[str, object], stays: bool
) -> None:
    machine = H200._replace(gpu_bytes=int(gpu_gib * GIB))
    config = EngineConfig.model_validate(engine)
    assert plans.idles_on_gpu(config, trainer(8192), model(fields), machine) == stays


def test_where_idle_weights_stay_is_settled_before_a_run_and_can_be_said(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    def settled(**changes: object) -> str:
        config = RunConfig(model=str(model_folder)).but(trainer=TrainerConfig().but(**changes))
        return plans.resolve_colocation(config).trainer.sleep_weights

    monkeypatch.setattr(plans, "this_machine", lambda: H200)
    assert settled(mode="persistent") == "gpu"
    assert settled() == "gpu"
    assert settled(mode="per_step") == "host", "a program for each step holds nothing"
    assert settled(mode="persistent", sleep_weights="disk") == "disk"
    monkeypatch.setattr(devices, "device", lambda: "cpu")
    assert settled(mode="persistent") == "host"


@pytest.mark.parametrize(
    ("gpu_gib", "engine", "mode"),
    [
        (139.8, {"colocation": "keep_weights"}, "persistent"),
        (79.6, {"colocation": "restart"}, "persistent"),
        (23.5, {"colocation": "reload"}, "per_step"),
        (23.5, {"colocation": "reload", "memory_fraction": 0.6}, "persistent"),
        (23.5, {"colocation": "reload", "memory_fraction": 0.74, "tensor_parallel": 2}, "per_step"),
        (23.5, {"colocation": "separate_gpus"}, "persistent"),
    ],
)
def test_the_trainer_stays_up_where_it_fits_beside_the_engine(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path, gpu_gib: float, engine: dict[str, object], mode: str
) -> None:
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    monkeypatch.setattr(plans, "this_machine", lambda: H200._replace(gpu_bytes=int(gpu_gib * GIB)))
    monkeypatch.setattr(plans, "plan", lambda config: devices.Plan(config.engine.colocation, "given"))
    config = RunConfig(model=str(model_folder), engine=EngineConfig.model_validate(engine))
    assert plans.resolve_colocation(config).trainer.mode == mode
    by_hand = config.but(trainer={"mode": "per_step"})
    assert plans.resolve_colocation(by_hand).trainer.mode == "per_step"


def test_the_trainer_stays_up_on_a_cpu_and_not_over_several_nodes(monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
    config = RunConfig(model=str(model_folder))
    monkeypatch.setattr(devices, "device", lambda: "cpu")
    assert plans.resolve_colocation(config).trainer.mode == "persistent"
    monkeypatch.setenv("RATCHET_CLUSTER_ADDRESS", "node0:6379")
    settings.cache_clear()
    assert plans.resolve_colocation(config).trainer.mode == "per_step"
    settings.cache_clear()


def test_gpus_of_engine_and_trainer_are_apart_or_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(engine: str, trainer: str) -> Settings:
        monkeypatch.setenv("RATCHET_ENGINE_GPUS", engine)
        monkeypatch.setenv("RATCHET_TRAINER_GPUS", trainer)
        return Settings()

    assert given("[0]", "[1, 2]").is_split
    assert not given("[0, 1]", "[1, 0]").is_split
    with pytest.raises(ValidationError, match=r"share GPUs \[1\]"):
        given("[0, 1]", "[1, 2]")
    with pytest.raises(ValidationError, match="set both or neither"):
        given("[0]", "[]")


def test_an_engine_uses_the_gpus_that_it_was_given_else_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.cache_clear()
    monkeypatch.setattr(nvml, "numbers", lambda: (1, 3, 5))
    assert devices.engine_gpus(2) == [1, 3]
    monkeypatch.setenv("RATCHET_ENGINE_GPUS", "[6, 7]")
    monkeypatch.setenv("RATCHET_TRAINER_GPUS", "[4]")
    settings.cache_clear()
    assert devices.engine_gpus(2) == [6, 7]
    settings.cache_clear()


def test_the_trainer_gets_its_own_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places = dict.fromkeys(("model_path", "batch_path", "output_dir", "result_path"), tmp_path)
    job = TrainJob(
        **places,  # type: ignore[arg-type]
        base_model_id="m",
        adapter_path=None,
        adapter_version=0,
        adapter_sha256="base",
        num_optimizer_steps=0,
        seed=0,
        num_threads=1,
        device="cuda",
        trainer=TrainerConfig(),
    )
    monkeypatch.setenv("RATCHET_ENGINE_GPUS", "[0]")
    monkeypatch.setenv("RATCHET_TRAINER_GPUS", "[2, 3]")
    settings.cache_clear()
    found = torchrun.environment(job, tmp_path)
    settings.cache_clear()
    assert (found["CUDA_DEVICE_ORDER"], found["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "2,3")
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == torchrun.ALLOCATOR


def test_torch_knows_what_the_trainer_asks_of_its_allocator() -> None:
    """Of a name that it does not know it says nothing before there is a GPU; of a size that is too small it does."""
    with pytest.raises(ValueError, match="option large_segment_size_mb must be"):
        torch._C._accelerator_setAllocatorSettings(torchrun.ALLOCATOR.replace(":256", ":7"))


def test_a_trainer_that_shares_the_experts_needs_room_for_the_rest_alone() -> None:
    mixture, own, shared = model(MIXTURE_30B), trainer(8192), trainer(8192, share_experts=True)
    of_experts = 3 * 48 * 128 * 768 * 2048 * 2
    assert trainer_peak_bytes(own, mixture) - trainer_peak_bytes(shared, mixture) == of_experts > 53 * GIB
    assert plans.choose(EngineConfig(), own, mixture, H200).colocation == "offload"
    assert plans.choose(EngineConfig(), shared, mixture, H200).colocation == "keep_weights"
    on_host = {"mode": "persistent", "sleep_weights": "host"}
    parts = plans.host_parts("keep_weights", EngineConfig(), shared.but(**on_host), mixture, H200)
    assert parts["the sleeping trainer's weights"] == mixture.weight_bytes - of_experts
    with pytest.raises(
        ValueError,
        match=r"trainer\.share_experts true needs the plan keep_weights: the trainer needs about .* do not fit beside it",
    ):
        plans.choose(EngineConfig(), shared.but(max_tokens_per_microbatch=32768), mixture, H200)
    with pytest.raises(
        ValueError, match=r"trainer\.share_experts true needs one GPU for both, but engine and trainer have GPUs of"
    ):
        plans.choose(EngineConfig(), shared, mixture, H200._replace(is_split=True))
    assert trainer_peak_bytes(trainer(8192, share_experts=True), model(DENSE_7B)) == trainer_peak_bytes(own, model(DENSE_7B))


def test_the_host_must_hold_files_in_memory_the_engines_copy_and_the_trainers_within_nine_tenths() -> None:
    mixture, config, engine = model(MIXTURE_30B), trainer(8192, mode="persistent"), EngineConfig()
    on_disk = plans.host_parts("offload", engine, config, mixture, H200)
    assert {name: round(size / GIB) for name, size in on_disk.items()} == {
        "the sleeping engine's weights": 57,
        "the trainer's adapter and optimizer state": 9,
    }
    assert plans.host_parts("reload", engine, trainer(8192, mode="per_step"), mixture, H200) == {}
    in_memory = H200._replace(model_files_bytes=mixture.weight_bytes)
    parts = plans.host_parts("offload", engine, config.but(sleep_weights="host"), mixture, in_memory)
    assert sorted(round(size / GIB) for size in parts.values()) == [9, 57, 57, 57]
    host_memory.check(parts, int(sum(parts.values()) / 0.9) + 1)
    message = (
        r"the host's memory of 125.0 GiB would hold 180.0 GiB \(the model's files in memory 56.9, the sleeping engine's weights 56.9, the sleeping "
        r"trainer's weights 56.9, the trainer's adapter and optimizer state 9.4\), allowed are 90%: put the model on a disk"
    )
    with pytest.raises(ValueError, match=message):
        host_memory.check(parts, H200.host_bytes)
    assert host_memory.fits(on_disk, H200.host_bytes)


def test_a_host_that_is_too_small_is_refused_before_a_run(monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
    by_hand = RunConfig(model=str(model_folder), engine=EngineConfig(colocation="offload"))
    monkeypatch.setattr(plans, "this_machine", lambda: H200)
    plans.check_host(by_hand)
    monkeypatch.setattr(plans, "this_machine", lambda: H200._replace(host_bytes=2**16))
    with pytest.raises(ValueError, match=r"would hold .* GiB \(.*the sleeping engine's weights"):
        plans.check_host(by_hand)
    monkeypatch.setattr(plans, "this_machine", lambda: H200._replace(host_bytes=2**16, is_gpu=False))
    plans.check_host(by_hand)


def test_files_in_memory_are_those_behind_the_links_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("disk", "disk/memory", "folder"):
        (tmp_path / place).mkdir()
    (tmp_path / "disk/memory/a.safetensors").write_bytes(b"12345")
    (tmp_path / "disk/b.safetensors").write_bytes(b"123")
    for path in ("disk/memory/a.safetensors", "disk/b.safetensors"):
        (tmp_path / "folder" / Path(path).name).symlink_to(tmp_path / path)
    mounts = [(str(tmp_path / "disk"), "ext4"), (str(tmp_path / "disk/memory"), "tmpfs")]
    partitions = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: partitions)
    assert host_memory.files_in_memory_bytes(tmp_path / "folder") == 5
    assert host_memory.files_in_memory_bytes(tmp_path / "disk") == 0
