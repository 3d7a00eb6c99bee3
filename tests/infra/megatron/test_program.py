"""The program at its border: what it refuses, what it says, in which order it writes."""

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from infra.megatron.__main__ import main, run
from infra.megatron.checkpoint import adapter_state
from infra.megatron.checkpoint import save as checkpoint
from infra.megatron.checkpoint.adapter_state import Kept
from infra.megatron.model import attention, base_weights, parallel
from infra.megatron.model.experts import fused_gemm
from infra.megatron.model.kernel_packages import UnusableKernel
from infra.megatron.program import check_job
from infra.megatron.program.session import TrainerSession
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CANARY
from infra.megatron.protocol.optimizer_files import MOMENTS
from infra.settings import CHECKOUT
from infra.store import files
from infra.store.digests import sha256_of, stamp_of

Job = Callable[..., Any]
Refused = Callable[..., str]


def changed(batch: dict[str, Tensor], name: str, where: int, value: float) -> dict[str, Tensor]:
    batch[name][where] = value
    return batch


BAD_BATCHES: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "token too large": (lambda b: changed(b, "tokens", 20, 512), "token id 512 is out of the vocabulary of 512 (sequence"),
    "token negative": (
        lambda b: changed(b, "tokens", 0, -1),
        "token id -1 is out of the vocabulary of 512 (sequence 0, position 0; 1 such)",
    ),
    "one vector short": (lambda b: b | {"advantages": b["advantages"][:-1]}, "lengths disagree: tokens "),
    "starts end early": (lambda b: b | {"cu_seqlens": b["cu_seqlens"][:-1]}, "lengths disagree: cu_seqlens must rise from 0 to"),
    "starts fall": (lambda b: b | {"cu_seqlens": b["cu_seqlens"][[0, 2, 1, 8]]}, "lengths disagree: cu_seqlens must rise"),
    "an empty sequence": (lambda b: b | {"cu_seqlens": b["cu_seqlens"][[0, 1, 1, 8]]}, "lengths disagree: cu_seqlens must rise"),
    "advantage not a number": (lambda b: changed(b, "advantages", 9, torch.nan), "advantages nan is not finite"),
    "logprob infinite": (lambda b: changed(b, "rollout_logprobs", 9, -torch.inf), "rollout_logprobs -inf is not finite"),
    "logprob positive": (lambda b: changed(b, "rollout_logprobs", 9, 0.01), "is positive, no log-probability"),
    "no loss token": (lambda b: b | {"loss_mask": torch.zeros_like(b["loss_mask"])}, "loss_mask leaves no token to learn from"),
    "mask of 2": (lambda b: changed(b, "loss_mask", 9, 2), "loss_mask 2 is neither 0 nor 1"),
    "first token in the loss": (lambda b: changed(b, "loss_mask", 0, 1), "is its sequence's first and in the loss"),
    "a tensor missing": (lambda b: {k: v for k, v in b.items() if k != "advantages"}, "has no tensor advantages"),
    "a group missing": (
        lambda b: b | {"groups": torch.zeros(7, dtype=torch.int64)},
        "lengths disagree: groups 7 for 8 sequences",
    ),
    "groups of another type": (lambda b: b | {"groups": torch.zeros(8)}, "groups is torch.float32 [8], should be a vector of"),
    "reward not a number": (lambda b: b | {"rewards": torch.full((8,), torch.nan)}, "rewards nan is not finite (sequence 0)"),
    "another type": (lambda b: b | {"tokens": b["tokens"].int()}, "tokens is torch.int32"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_bad_batch_is_refused(name: str, new_job: Job, make_batch: Callable[..., Any], refused: Refused) -> None:
    spoil, said = BAD_BATCHES[name]
    assert said in refused(new_job(batch=spoil(make_batch())))


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"adapter_version": "1"}, "was sampled by adapter version 1 (base), the job trains version 0 (base)"),
        ({"adapter_sha256": "ab12"}, "was sampled by adapter version 0 (ab12), the job trains version 0 (base)"),
        ({"temperature": "0"}, "temperature 0.0 is not above 0"),
        ({"temperature": "warm"}, "bad or missing metadata"),
    ],
)
def test_a_batch_with_bad_metadata_is_refused(metadata: dict[str, str], said: str, new_job: Job, refused: Refused) -> None:
    assert said in refused(new_job(metadata=metadata))


OLDER = {"correction": {"mode": "decoupled", "kind": "tis", "max_staleness": 1}}


def test_samples_of_the_adapter_before_are_trained_on_where_that_is_allowed(train: Job) -> None:
    made = train(
        after=train(),
        metadata={"adapter_version": "0", "adapter_sha256": "base"},
        job={"sampler_version": 0, "sampler_sha256": "base", "switches": {"NVTE_X": "1"}},
        loss=OLDER,
    )
    assert made.result.adapter_version == 2
    assert made.result.versions["NVTE_X"] == "1", "a job's switches are among the versions that it reports"


@pytest.mark.parametrize(
    ("metadata", "sampler", "loss", "said"),
    [
        (
            {"adapter_version": "0", "adapter_sha256": "base"},
            (0, "base"),
            {},
            "an adapter 1 steps older than version 1, which the job",
        ),
        (
            {"adapter_version": "0", "adapter_sha256": "ab"},
            (0, "base"),
            OLDER,
            "(ab), the job expects samples of version 0 (base)",
        ),
        ({"adapter_version": "0", "adapter_sha256": "base"}, None, OLDER, "version 0 (base), the job trains version 1 ("),
        ({"adapter_version": "2", "adapter_sha256": "ab"}, (2, "ab"), OLDER, "an adapter -1 steps older than version 1"),
    ],
)
def test_samples_of_another_adapter_than_that_are_refused(
    metadata: dict[str, str],
    sampler: tuple[int, str] | None,
    loss: dict[str, Any],
    said: str,
    train: Job,
    new_job: Job,
    refused: Refused,
) -> None:
    job = {"sampler_version": sampler[0], "sampler_sha256": sampler[1]} if sampler else {}
    assert said in refused(new_job(after=train(), metadata=metadata, job=job, loss=loss))


@pytest.mark.parametrize("lacking", ["groups", "rewards", "advantage"])
def test_a_penalty_in_the_reward_needs_to_know_how_advantages_were_made(
    lacking: str, new_job: Job, make_batch: Callable[..., Any], refused: Refused
) -> None:
    batch = make_batch() | {"groups": torch.arange(8) // 2, "rewards": torch.ones(8)}
    batch.pop(lacking, None)
    metadata = {} if lacking == "advantage" else {"advantage": "grpo"}
    loss = {"kl": {"coefficient": 0.1, "where": "reward"}}
    assert f"a KL penalty in the reward needs the batch's {lacking}" in refused(
        new_job(batch=batch, metadata=metadata, loss=loss)
    )


def test_a_penalty_in_the_reward_needs_groups_of_two_or_more(
    new_job: Job, make_batch: Callable[..., Any], refused: Refused
) -> None:
    batch = make_batch() | {"groups": torch.tensor([0, 0, 1, 1, 1, 4, 3, 3]), "rewards": torch.ones(8)}
    made = new_job(batch=batch, metadata={"advantage": "grpo"}, loss={"kl": {"coefficient": 0.1, "where": "reward"}})
    assert "group 4 has 1 sequence, advantage 'grpo' needs 2 or more (1 such)" in refused(made)


def test_an_unknown_kind_of_advantage_is_refused(new_job: Job, refused: Refused) -> None:
    assert "advantage 'gae' is unknown; known are grpo, dr_grpo, rloo, reinforce_pp" in refused(
        new_job(metadata={"advantage": "gae"})
    )


def test_a_rounding_error_above_zero_is_no_bad_logprob(new_job: Job, make_batch: Callable[..., Any]) -> None:
    made = new_job(batch=changed(make_batch(), "rollout_logprobs", 9, 5e-5))
    assert main([str(made.path)]) == 0


def test_a_truncated_batch_is_refused(new_job: Job, refused: Refused) -> None:
    made = new_job()
    made.job.batch_path.write_bytes(made.job.batch_path.read_bytes()[:-100])
    assert "is no whole safetensors file" in refused(made)


@pytest.mark.parametrize(
    ("name", "trainer", "world_size", "said"),
    [
        (
            "qwen3",
            {"num_processes": 2},
            3,
            "torchrun started 3 processes, the job's trainer.num_processes is 2: run it with --nproc-per-node 2",
        ),
        ("qwen3", {"num_processes": 4, "tensor_parallel": 4}, 4, "1, 2 would"),
        ("qwen3", {"num_processes": 2, "expert_parallel": 2}, 2, "a model without experts"),
        ("qwen3-moe", {"num_processes": 2, "tensor_parallel": 2}, 2, "needs sequence_parallel"),
        ("qwen3", {"max_tokens_per_microbatch": 20}, 1, "more than max_tokens_per_microbatch 20"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    name: str,
    trainer: dict[str, Any],
    world_size: int,
    said: str,
    new_job: Job,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    assert said in refused(new_job(name, **trainer))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trainer": {"lora": {"rank": 4}}}, "its r is 8, the job's is 4"),
        ({"trainer": {"lora": {"alpha": 32}}}, "its lora_alpha is 16, the job's is 32"),
        ({"trainer": {"lora": {"target_modules": ["q_proj"]}}}, "its target_modules is ['q_proj', 'k_proj'"),
        ({"job": {"num_optimizer_steps": 7}}, "its optimizer has taken 1 steps, the job says num_optimizer_steps 7"),
        ({"job": {"num_optimizer_steps": 0}}, "its optimizer has taken 1 steps, the job says num_optimizer_steps 0"),
        ({"job": {"adapter_version": 7}}, "was sampled by adapter version 1 ("),
        ({"job": {"adapter_sha256": "ab12"}}, "the job says ab12"),
        ({"job": {"adapter_path": None}}, "adapter_version 1 ("),
        ({"job": {"adapter_version": 0}}, "was sampled by adapter version 1 ("),
        ({"job": {"adapter_path": Path("/nowhere")}}, "has no adapter_config.json"),
    ],
)
def test_another_adapter_than_the_job_says_is_refused(
    change: dict[str, Any], said: str, first: Any, new_job: Job, refused: Refused
) -> None:
    assert said in refused(new_job(after=first, job=change.get("job"), **change.get("trainer", {})))


@pytest.fixture(scope="module")
def first(train: Job) -> Any:
    return train()


@pytest.mark.parametrize("missing", [ADAPTER_CONFIG, *MOMENTS.values()])
def test_half_an_adapter_is_refused(missing: str, first: Any, new_job: Job, refused: Refused, tmp_path: Path) -> None:
    shutil.copytree(first.job.output_dir, tmp_path / "adapter")
    (tmp_path / "adapter" / missing).unlink()
    said = refused(new_job(after=first, job={"adapter_path": tmp_path / "adapter"}))
    assert f"has no {missing}" in said
    assert ("only from a version that has kept its own" in said) == (missing != ADAPTER_CONFIG)


def test_files_that_are_not_read_are_known_by_their_digests_alone(first: Any, new_job: Job, tmp_path: Path) -> None:
    shutil.copytree(first.job.output_dir, tmp_path / "adapter")
    job = new_job(after=first, job={"adapter_path": tmp_path / "adapter"}).job
    (tmp_path / "adapter" / MOMENTS["exp_avg"]).write_bytes(b"not looked at")
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        check_job.check(job, 1)

    session = TrainerSession()
    assert not session.holds(job)
    session.kept = Kept(adapter_state.needed_by(job), {}, is_on_device=False)
    assert session.holds(job) and not session.holds(job.model_copy(update={"adapter_sha256": "another"}))
    assert check_job.check(job, 1, is_kept=session.holds(job)).batch.adapter_version == 1
    assert session.take(job) and not session.holds(job)

    (tmp_path / "adapter" / ADAPTER_WEIGHTS).write_bytes(b"changed")
    with pytest.raises(ValueError, match="has SHA-256"):
        check_job.check(job, 1, is_kept=True)


@pytest.mark.parametrize("name", MOMENTS.values())
def test_an_optimizer_state_that_is_not_whole_is_refused(
    name: str, first: Any, new_job: Job, refused: Refused, tmp_path: Path
) -> None:
    path = shutil.copytree(first.job.output_dir, tmp_path / "adapter") / name
    made, moments = new_job(after=first, job={"adapter_path": tmp_path / "adapter"}), load_file(path)
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{path} is no whole safetensors file" in refused(made)
    save_file(moments, path)
    assert f"{path} does not say its num_optimizer_steps" in refused(made)
    lost = sorted(moments)[0]
    del moments[lost]
    save_file(moments, path, {"num_optimizer_steps": "1"})
    assert f"{path}: no tensor {lost} (1 such)" in refused(made)


@pytest.mark.parametrize("name", MOMENTS.values())
def test_moments_of_two_versions_are_refused(
    name: str, first: Any, train: Job, new_job: Job, refused: Refused, tmp_path: Path
) -> None:
    later = train(after=first)
    for mine, others in ((first, later), (later, first)):
        folder = shutil.copytree(mine.job.output_dir, tmp_path / str(mine.result.adapter_version))
        shutil.copyfile(others.job.output_dir / name, folder / name)
        said = refused(new_job(after=mine, job={"adapter_path": folder}))
        assert f"adapter {folder}: its moments do not belong together" in said
        for moment in MOMENTS.values():
            owner = others if moment == name else mine
            assert f"{Path(moment).name} of {owner.result.num_optimizer_steps}" in said


def test_an_adapter_of_an_earlier_version_with_both_moments_in_one_file_is_gone_on_from(
    first: Any, train: Job, new_job: Job, refused: Refused, as_one_file: Callable[[Path], Path], tmp_path: Path
) -> None:
    expected, folder = train(after=first), shutil.copytree(first.job.output_dir, tmp_path / "adapter")
    before, moments = as_one_file(folder), first.moments
    made = train(after=first, job={"adapter_path": folder, "moments_sha256": {"optimizer": sha256_of(before)}})
    for name in (ADAPTER_WEIGHTS, *MOMENTS.values()):
        assert (made.job.output_dir / name).read_bytes() == (expected.job.output_dir / name).read_bytes()
    save_file(moments, before, {"num_optimizer_steps": "2"})
    said = refused(new_job(after=first, job={"adapter_path": folder}))
    assert "its optimizer has taken 2 steps, the job says num_optimizer_steps 1" in said
    lost = sorted(moments)[0]
    del moments[lost]
    save_file(moments, before, {"num_optimizer_steps": "1"})
    assert f"{before}: no tensor {lost} (1 such)" in refused(new_job(after=first, job={"adapter_path": folder}))
    shutil.copyfile(first.job.output_dir / MOMENTS["exp_avg_sq"], folder / MOMENTS["exp_avg_sq"])
    said = refused(new_job(after=first, job={"adapter_path": folder}))
    assert (
        f"adapter {folder} has state/optimizer.safetensors and state/exp_avg_sq.safetensors: which is its optimizer state is not known"
        in said
    )


def test_a_base_model_that_is_not_whole_is_refused(
    new_job: Job, refused: Refused, model: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(model("llama"), tmp_path / "model")
    made = new_job("llama", job={"model_path": tmp_path / "model"})
    tensors = load_file(tmp_path / "model/model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name][1:].contiguous()}, tmp_path / "model/model.safetensors")
    assert f"tensor {name} in {tmp_path}/model has shape (127, 64)" in refused(made)
    del tensors[name]
    save_file(tensors, tmp_path / "model/model.safetensors")
    assert f"has no tensor {name}" in refused(made)
    (tmp_path / "model/config.json").unlink()
    assert "config.json cannot be read" in refused(made)


def test_attention_that_computes_wrong_is_refused_before_the_step(
    new_job: Job, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def wrong(*shape: object) -> None:
        asked.append(shape)
        raise UnusableKernel("flash-attn-4 computes attention wrong on this GPU")

    monkeypatch.setattr(attention, "check", wrong)
    assert refused(new_job()) == "error: flash-attn-4 computes attention wrong on this GPU\n"
    assert asked == [(torch.device("cpu"), torch.float32, 4, 2, 32)]
    parallel.stop()


def test_products_of_experts_that_are_wrong_are_refused_before_the_step(
    new_job: Job, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def wrong(*shape: object) -> None:
        asked.append(shape)
        if len(asked) == 2:
            raise UnusableKernel("quack-kernels computes the experts' products wrong on this GPU")

    monkeypatch.setattr(fused_gemm, "check", wrong)
    made = new_job("qwen3-moe")
    assert refused(made) == "error: quack-kernels computes the experts' products wrong on this GPU\n"
    config = json.loads((made.job.model_path / "config.json").read_text())
    hidden, ffn = config["hidden_size"], config["moe_intermediate_size"]
    assert [shape[2:] for shape in asked] == [(hidden, 2 * ffn), (ffn, hidden)]
    parallel.stop()


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [(attention, "check", UnusableKernel("wrong")), (base_weights, "load_base", base_weights.UnusableBase("broken"))],
)
def test_a_program_that_stays_goes_on_after_a_refusal(
    module: ModuleType, name: str, error: Exception, new_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    session = TrainerSession(stays=True)
    with monkeypatch.context() as patched:
        patched.setattr(module, name, refuse)
        assert run(new_job().path, session) == 2
    session.sleep()
    try:
        assert run(new_job().path, session) == 0
    finally:
        session.end()


def test_places_that_are_taken_or_missing_are_refused(new_job: Job, refused: Refused) -> None:
    made = new_job()
    made.job.result_path.write_text("{}")
    assert "is already there" in refused(made)
    made.job.result_path.unlink()
    (made.job.output_dir / "old").touch()
    assert "is not empty, it holds old" in refused(made)
    (made.job.output_dir / "old").unlink()
    made.job.output_dir.rmdir()
    assert "is no folder" in refused(made)


def test_a_bad_job_file_is_refused(new_job: Job, refused: Refused, edit_json: Callable[..., None]) -> None:
    made = new_job()
    edit_json(made.path, device="tpu", surprise=1)
    message = refused(made)
    assert "device: Input should be 'cpu' or 'cuda'" in message
    assert "surprise: Extra inputs are not permitted" in message
    made.path.unlink()
    assert "cannot be read" in refused(made)


def test_losses_that_are_not_numbers_fail_the_step_by_the_metrics_name(
    new_job: Job, refused: Refused, model: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(model("llama"), tmp_path / "model")
    tensors = load_file(tmp_path / "model/model.safetensors")
    tensors["model.norm.weight"][3] = 3e38  # a number, and its products are none
    save_file(tensors, tmp_path / "model/model.safetensors")
    made = new_job("llama", job={"model_path": tmp_path / "model"})
    assert refused(made, code=3) == "error: train/loss is nan; nothing was written\n"


def test_the_result_is_written_last(new_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    made, order = new_job(), []
    write_by = files.write_by

    def noted(fill: Callable[[Path], object], path: Path, **how: Any) -> Path:
        assert not made.job.result_path.exists()
        order.append(path.name)
        return write_by(fill, path, **how)

    monkeypatch.setattr(files, "write_by", noted)
    assert main([str(made.path)]) == 0
    assert order[-1] == "result.json"
    assert set(order[:-1]) == {Path(name).name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, *MOMENTS.values(), CANARY)}


def test_the_result_holds_the_digests_of_what_was_written(new_job: Job) -> None:
    made = new_job()
    assert main([str(made.path)]) == 0
    found = made.result.files
    assert found.keys() == {ADAPTER_WEIGHTS, *MOMENTS.values()}
    for name, digest in found.items():
        path = made.job.output_dir / name
        assert (digest.sha256, digest.stamp) == (hashlib.sha256(path.read_bytes()).hexdigest(), stamp_of(path))


def test_a_program_that_stays_gives_the_device_back_while_the_files_are_written(
    new_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, session, asleep = new_job(), TrainerSession(stays=True), threading.Event()
    write_by, give_back = files.write_by, TrainerSession._give_back

    def after_the_sleep(fill: Callable[[Path], object], path: Path, **how: Any) -> Path:
        if path.suffix == ".safetensors":
            assert asleep.wait(60), "the files were waited for"
        return write_by(fill, path, **how)

    def noted(self: TrainerSession) -> int:
        asleep.set()
        return give_back(self)

    monkeypatch.setattr(files, "write_by", after_the_sleep)
    monkeypatch.setattr(TrainerSession, "_give_back", noted)
    try:
        assert run(made.path, session) == 0
    finally:
        session.end()
    assert made.result.num_optimizer_steps == 1


def test_a_run_that_dies_while_writing_leaves_no_result(new_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    made = new_job()

    def full_disk(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "peft_config", full_disk)
    with pytest.raises(OSError, match="No space"):
        main([str(made.path)])
    parallel.stop()
    assert (made.job.output_dir / ADAPTER_WEIGHTS).exists()
    assert not made.job.result_path.exists()


@pytest.fixture
def torchrun(child_environment: dict[str, str]) -> Callable[[Any], subprocess.CompletedProcess[str]]:
    def run(made: Any) -> subprocess.CompletedProcess[str]:
        count = str(made.job.trainer.num_processes)
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            count,
            "-m",
            "infra.megatron",
        ]
        return subprocess.run(
            [*command, str(made.path)],
            env=child_environment,
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            timeout=180,
        )

    return run


def test_under_torchrun_it_trains_and_tells_its_progress(new_job: Job, torchrun: Callable[..., Any], first: Any) -> None:
    made = new_job(num_processes=2, max_tokens_per_microbatch=60)
    done = torchrun(made)
    assert done.returncode == 0, done.stderr
    assert "micro-batch 1/2  " in done.stdout
    assert done.stdout.count("micro-batch 1/") == 1, "only rank 0 speaks"
    assert made.metrics == pytest.approx(first.metrics, rel=2e-5, abs=1e-7)
    assert json.loads((made.job.output_dir / ADAPTER_CONFIG).read_text())["peft_type"] == "LORA"


def test_under_torchrun_bad_input_ends_with_one_error_line(
    new_job: Job, torchrun: Callable[..., Any], make_batch: Callable[..., Any]
) -> None:
    made = new_job(batch=changed(make_batch(), "tokens", 0, 999), num_processes=2)
    done = torchrun(made)
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        f"error: batch {made.job.batch_path}: token id 999 is out of the vocabulary of 512 (sequence 0, position 0; 1 such)"
    ]
    assert made.written() == []
