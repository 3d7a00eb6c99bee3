"""The scripts for GPUs run here too, in small: no GPU minute is lost to a slip of the pen."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from shared import RATCHET, write_interpreter

from infra.models import base_model
from infra.models.architecture import base_shapes, read_architecture
from infra.models.weights import check_base
from infra.store.files import read_json
from infra.tiny_model.architecture import random_model
from infra.tiny_model.tokenizer import train_tokenizer

ROOT = Path(__file__).parents[1]


def run(script: str, *arguments: str, **environment: str) -> str:
    done = python(str(ROOT / "tests/gpu" / script), *arguments, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.fixture(scope="session")
def small_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "model"
    run("random_model.py", "small-moe", str(folder))
    return folder


def test_a_random_model_is_whole(small_mixture: Path) -> None:
    a = read_architecture(small_mixture)
    check_base(small_mixture, a)
    index = read_json(small_mixture / "model.safetensors.index.json")["weight_map"]
    assert set(index) == set(base_shapes(a))
    tensors = load_file(small_mixture / index["model.norm.weight"])
    assert tensors["model.norm.weight"].min() == 1
    assert 0.04 < tensors["model.layers.1.mlp.experts.7.up_proj.weight"].float().std() < 0.06


@pytest.mark.full  # the rest of this file is its sample
def test_a_reward_model_is_measured(tmp_path: Path) -> None:
    sizes = ["--shape", "small", "--samples", "24", "--tokens", "100", "--device", "cpu"]
    said = run(
        "reward_model.py", str(tmp_path / "out.json"), str(tmp_path / "model"), *sizes, RATCHET_WORKSPACE=str(tmp_path / "ws")
    )
    assert said.endswith("done\n")
    figures = read_json(tmp_path / "out.json")
    assert figures["killed_s"] > figures["again_s"] and figures["against_float32"]["largest"] < 0.1


@pytest.mark.full  # the rest of this file is its sample
def test_the_speed_of_the_trainer_is_measured(small_mixture: Path, tmp_path: Path) -> None:
    sizes = ["--tokens", "600", "--seq", "100", "--spread", "--microbatch", "256", "512", "--repeat", "1"]
    said = run("train_speed.py", str(tmp_path / "speed.json"), "--model", str(small_mixture), *sizes, "--profile")
    assert said.endswith("done\n")
    found = read_json(tmp_path / "speed.json")
    assert [step["microbatch"] for step in found["steps"]] == [256, 512]
    assert all(step["tokens_per_s"] > 0 and step["sleep_s"] >= 0 for step in found["steps"])
    assert "wake" in found["steps"][1]["seconds"]
    assert found["fresh"]["wall_s"] > found["resident"][1]["wall_s"] > 0
    assert "wake" in found["resident"][1]["seconds"]
    assert "aten::" in (tmp_path / "speed.profile.txt").read_text()


def test_points_of_the_forecast_are_measured(tmp_path: Path) -> None:
    said = run("forecast.py", str(tmp_path / "points.json"), "--small", "--repeat", "1")
    found = read_json(tmp_path / "points.json")
    assert json.loads(said.splitlines()[-1]) == found
    # 4 prompts of 12 tokens, each with 3 samples of 10: a prompt's last token is computed for each sample
    assert {name: (case["rows"], case["num_loss_tokens"]) for name, case in found["cases"].items()} == {
        "small": (156, 120),
        "moe": (156, 120),
    }
    assert all(case["seconds"] > 0 for case in found["cases"].values())


def test_ways_of_attention_take_turns(tmp_path: Path) -> None:
    said = run("attention_backends.py", str(tmp_path / "attention.json"), "--small", "--microbatch", "64", "--repeat", "2")
    found = read_json(tmp_path / "attention.json")["steps"]
    assert [step["way"] for step in found] == ["torch varlen_attn", "flash-attn-4"] * 2
    assert len({step["loss"] for step in found}) == 1
    assert said.splitlines()[-1].startswith("64 flash-attn-4: ")


def test_prompts_computed_once_are_compared_with_prompts_of_each_sample(tmp_path: Path) -> None:
    assert run("prompts_once.py", str(tmp_path / "once.json"), "--small").endswith("done\n")
    found = read_json(tmp_path / "once.json")["shapes"]
    assert found.keys() == {"small", "small-moe"}
    for case in found.values():
        assert [step["rows"] for step in case["steps"]] == [4 * 3 * 21, 4 * (12 + 3 * 9)] * 3 + [4 * 3 * 21]
        assert case["gradient_repetition"] == 0 < case["gradient_shared"] < 1e-6
        assert case["gain"] > 0


def test_grouped_experts_are_compared_with_plain_ones(tmp_path: Path) -> None:
    assert run("experts.py", str(tmp_path / "experts.json")).endswith("6 passed, 0 failed\n")
    found = read_json(tmp_path / "experts.json")
    assert {"128 tokens, rank 8, products by torch, sums by Triton", "128 tokens, rank 8, sums by quack"} <= found["speed"].keys()
    assert all(row["forward_ms"] > 0 for row in found["speed"].values())
    assert len(found["narrow"]) == 8 and all(row["ours_ms"] > 0 for row in found["narrow"].values())


def test_ways_of_an_adapters_copy_for_the_engine_take_turns(tmp_path: Path) -> None:
    said = run("export_speed.py", str(tmp_path / "export.json"), str(tmp_path / "files"), "--layers", "1", "--repeat", "2")
    found = read_json(tmp_path / "export.json")
    assert {name: len(turns) for name, turns in found["seconds"].items()} == {
        "rounded by the host": 2,
        "rounded by the device": 2,
    }
    assert found["digests_are_equal"] and not any((tmp_path / "files").iterdir())
    assert said.splitlines()[-1].startswith("rounded by the device: ")


def test_what_works_of_shared_experts_is_found_out(tmp_path: Path) -> None:
    run("shared_experts.py", str(tmp_path / "out.json"), "--small", RATCHET_WORKSPACE=str(tmp_path / "workspace"))
    found = read_json(tmp_path / "out.json")
    assert found["works"] and found["mapped"]["sums_are_equal"] and found["mapped"]["product_is_equal"]
    assert found["what a step says then"]["error"].startswith("EngineEnded: ")


@pytest.mark.full  # the rest of this file is its sample
def test_numbers_are_compared_over_layouts(tmp_path: Path) -> None:
    said = run("same_numbers.py", str(tmp_path / "same.json"), "--models", "small-moe", "--dtypes", "float32")
    assert said.endswith("5 passed, 0 failed\n")
    assert set(read_json(tmp_path / "same.json")) == {f"small-moe float32 {x}" for x in ("cpu", "1", "DP2", "EP2", "TP2+SP")}


@pytest.fixture
def over_scripted_server(tmp_path: Path) -> dict[str, str]:
    """Environment in which SGLang's interpreter starts the scripted server."""
    script = ROOT / "tests/infra/engines/scripted_sglang_server.py"
    program = write_interpreter(tmp_path / "python-of-sglang", f"{sys.executable} {script}", {"scripted": "1"})
    return {
        "RATCHET_WORKSPACE": str(tmp_path / "workspace"),
        "RATCHET_SGLANG_PYTHON": str(program),
        "RATCHET_TEST_FAULT": str(tmp_path / "fault"),
    }


@pytest.fixture(scope="session")
def small_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "dense"
    run("random_model.py", "small", str(folder))
    return folder


def test_rounds_of_the_hand_over_give_equal_bits_and_lost_weights_are_caught(
    small_dense: Path, tmp_path: Path, over_scripted_server: dict[str, str]
) -> None:
    plans = ["--small", "--model", str(small_dense), "--plans", "keep_weights", "reload", "--rounds", "2"]
    assert run("hand_over.py", str(tmp_path / "out.json"), "rounds", *plans, **over_scripted_server).endswith("done\n")
    found = read_json(tmp_path / "out.json")
    assert [each["same_bits"] for plan in ("keep_weights", "reload") for each in found[plan]["rounds"]] == [True] * 4
    assert found["negative_control"].startswith("caught: golden check")


@pytest.mark.full  # the rest of this file is its sample
def test_ways_to_serve_a_rollout_are_compared(small_dense: Path, tmp_path: Path, over_scripted_server: dict[str, str]) -> None:
    variants = ["SGLANG_EXPERIMENTAL_LORA_OPTI=1 max_running_requests=4 --num-continuous-decode-steps 4", "quantization=fp8"]
    model = ["--small", "--model", str(small_dense), "--forms", "--variants", *variants]
    assert run("rollout_speed.py", str(tmp_path / "out.json"), *model, **over_scripted_server).endswith("done\n")
    rows = read_json(tmp_path / "out.json")["rows"]
    assert {"base, no LoRA", "merged", "adapter, torch_native", "adapter, torch_native, one batch"} <= set(rows)
    assert "engine.quantization 'fp8' needs a GPU" in rows.pop("adapter, quantization=fp8")["failed"]
    assert all(row["tokens_per_s"] > 0 for row in rows.values()) and f"adapter, {variants[0]}" in rows


def test_parts_of_a_start_are_measured_and_a_second_one_compiles_nothing(
    small_dense: Path, tmp_path: Path, over_scripted_server: dict[str, str]
) -> None:
    given = ["--small", "--model", str(small_dense)]
    assert run("starts.py", str(tmp_path / "out.json"), *given, **over_scripted_server).endswith("done\n")
    starts = read_json(tmp_path / "out.json")["starts"]
    assert [name for name, row in starts.items() if row["compiled_files"]] == ["cold"] and len(starts) == 5
    assert starts["cold"]["compiled"] == "triton 1" and starts["warm"]["compiled"] == "nothing"
    (tmp_path / "fault").write_text("compiles again")
    said = run("starts.py", str(tmp_path / "out.json"), *given, "--cases", "cold", "warm", **over_scripted_server)
    assert "FAILED: the second start compiled 1 files: triton 1" in said


@pytest.mark.full  # two rl-steps; the rest of this file is its sample
@pytest.mark.end_to_end
def test_steps_are_timed_from_the_last_sampled_token_to_training_and_back(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    shutil.copytree(base_model.locate("tiny"), workspace / "models/tiny")
    given = ["steps", "--small", "--steps", "3", "--set", "engine.colocation=reload", "--set", "trainer.mode=persistent"]
    assert run("hand_over.py", str(tmp_path / "out.json"), *given, RATCHET_WORKSPACE=str(workspace)).endswith("done\n")
    found = read_json(tmp_path / "out.json")
    step, second, third = found["steps"]
    assert step["gpu_idle/to_training_s"] > sum(step["trainer_seconds"].get(phase, 0) for phase in ("import", "build", "load"))
    parts = third["hand_over_seconds"]
    to_training = sum(parts.values()) - parts["export, to the engine"] - parts["reload"]
    assert to_training == pytest.approx(third["gpu_idle/to_training_s"])
    assert {"canary", "golden check"} <= third["reload_seconds"].keys()
    assert found["gpu_idle/to_sampling_s"] <= max(second["gpu_idle/to_sampling_s"], third["gpu_idle/to_sampling_s"])
    assert 0 < found["beside_frac"] < 1 and found["step_s"] == third["first_token_at"] - second["first_token_at"]
    assert step["memory"]["memory/trainer_training_gib"] > 0


@pytest.mark.full
@pytest.mark.end_to_end
def test_ten_rollouts_of_the_real_sglang_are_equal_bit_for_bit(small_dense: Path, tmp_path: Path) -> None:
    """Fresh, warm, in another order, after a sleep and a kill, with 64, 8 and 1 requests at a time."""
    arguments = (str(tmp_path / "out.json"), "--small", "--model", str(small_dense))
    said = run("deterministic.py", *arguments, RATCHET_WORKSPACE=str(tmp_path / "workspace"))
    assert said.endswith("10 of 10 digests are equal\ndone\n")
    rows = read_json(tmp_path / "out.json")["rows"]
    ten = {name: row for name, row in rows.items() if not name.startswith("control")}
    assert len(ten) == 10 and len({row["digest"] for row in ten.values()}) == 1
    assert {row["max_logprob_difference"] for row in ten.values()} == {0}


@pytest.mark.end_to_end
@pytest.mark.rehearsal
def test_a_judge_that_takes_turns_with_the_engine_is_measured(tmp_path: Path) -> None:
    models = (str(tmp_path / "model"), str(tmp_path / "judge"))
    said = run("colocated_judge.py", str(tmp_path / "out.json"), *models, "--small", RATCHET_WORKSPACE=str(tmp_path / "ws"))
    assert said.endswith("done\n")
    rows = read_json(tmp_path / "out.json")["phases"]
    assert [row["phase"] for row in rows[:6]] == [row["phase"] for row in rows[6:12]] and len(rows) == 13


ROUTES = [
    *("--model", "MIXTURE", "--cases", "mixture, own routes", "mixture, replayed routes"),
    *("--set", 'trainer.lora.target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]', "--set", "trainer.max_mismatch=null"),
]


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        pytest.param("mismatch.py", [], marks=pytest.mark.rehearsal),
        pytest.param("mismatch.py", ROUTES, marks=pytest.mark.rehearsal),
        pytest.param("hand_over.py", ["run", "--steps", "3", "--set", "trainer.mode=persistent"], marks=pytest.mark.rehearsal),
        pytest.param("decoding.py", [], marks=pytest.mark.rehearsal),
        pytest.param("questions.py", ["--tokens", "40"], marks=pytest.mark.rehearsal),
        pytest.param("two_gpus.py", ["experts", "--model", "MIXTURE"], marks=pytest.mark.rehearsal),
        pytest.param("two_gpus.py", ["steps", "--steps", "1"], marks=pytest.mark.rehearsal),
        pytest.param("several_gpus.py", ["tiny", "--rows", "1+1:1", "auto:1", "--steps", "3"], marks=pytest.mark.rehearsal),
    ],
)
def test_a_script_runs_with_the_real_parts(script: str, arguments: list[str], small_mixture: Path, tmp_path: Path) -> None:
    given = [str(small_mixture) if argument == "MIXTURE" else argument for argument in arguments]
    workspace = tmp_path / "workspace"
    shutil.copytree(base_model.locate("tiny"), workspace / "models/tiny")
    said = run(script, str(tmp_path / "out.json"), *given, "--small", RATCHET_WORKSPACE=str(workspace))
    assert said.endswith("done\n")


@pytest.mark.full  # eight runs of a few steps
def test_learning_is_measured_and_a_run_that_does_not_learn_is_found(tmp_path: Path) -> None:
    """One step of a seed and of the control, with an engine that answers by chance: no seed gains what is wanted."""
    model, tokenizer = tmp_path / "model", train_tokenizer()
    tokenizer.save_pretrained(model)
    random_model("tiny", tokenizer, 0).save_pretrained(model)
    changes = (
        *(f"model={model}", "num_steps=1", "data.num_prompts=2", "sampling.group_size=2", "engine.kind=scripted"),
        "trainer.max_mismatch=null",  # of the model the scripted engine knows nothing
        *("trainer.mode=per_step", "evaluation.num_prompts=4", "evaluation.num_samples=2", "evaluation.pass_at_k=[1]"),
    )
    script = [str(ROOT / "tests/gpu/learning.py"), str(tmp_path / "out"), "--seeds", "3"]
    workspace = str(tmp_path / "ws")
    try:
        done = python(*script, *(word for change in changes for word in ("--set", change)), RATCHET_WORKSPACE=workspace)
    finally:
        python(*RATCHET[1:], "down", RATCHET_WORKSPACE=workspace)
    assert "a seed gained 0.000, wanted is 0.15" in done.stdout, done.stdout + done.stderr
    found = read_json(tmp_path / "out/learning-gpu.json")
    assert set(found["gains"]) == {"learning-arithmetic-gpu-3", "learning-arithmetic-gpu-control"}
    assert "| learning-arithmetic-gpu-3 |" in (tmp_path / "out/learning-gpu.md").read_text()
    assert (tmp_path / "out/learning-gpu.png").exists()
    assert done.returncode == 1
