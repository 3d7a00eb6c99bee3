"""The trainer's word on each token, asked for by itself, against what it said of all of them when it trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from torch import Tensor

from infra.megatron.program.token_logprobs import main

NewJob = Callable[..., Any]


def asked(made: Any, folder: Path) -> Tensor:
    out = folder / "logprobs.safetensors"
    assert main([str(made.path), str(out)]) == 0
    return safetensors.torch.load_file(out)["logprobs"]


@pytest.fixture(scope="module")
def second(train: NewJob) -> Any:
    """A step that went on from a trained adapter, in several micro-batches."""
    return train(after=train(), max_tokens_per_microbatch=64)


def test_token_by_token_it_says_what_the_step_said_of_all_tokens_together(second: Any, tmp_path: Path) -> None:
    batch = safetensors.torch.load_file(second.job.batch_path)
    differences = (asked(second, tmp_path) - batch["rollout_logprobs"])[batch["loss_mask"].bool()].abs()
    assert differences.mean().item() == pytest.approx(second.metrics["mismatch/mean_abs_logprob_diff"], rel=1e-5)
    assert differences.max().item() == pytest.approx(second.metrics["mismatch/max_abs_logprob_diff"], rel=1e-5)


def test_every_token_but_the_first_of_a_sequence_has_a_log_probability(
    new_job: NewJob, make_tree: Callable[..., Any], tmp_path: Path
) -> None:
    batch = make_tree()
    found = asked(new_job(batch=batch), tmp_path)
    firsts = batch["cu_seqlens"][:-1]
    assert (found == 0).nonzero()[:, 0].tolist() == firsts.tolist()
    apart = {name: values for name, values in batch.items() if name != "groups"}
    assert (found - asked(new_job(batch=apart), tmp_path)).abs().max() < 1e-5


def test_the_adapter_counts(second: Any, new_job: NewJob, tmp_path: Path) -> None:
    of_base = asked(new_job(), tmp_path)
    assert (asked(second, tmp_path) - of_base).abs().max() > 1e-3


def test_a_job_of_several_processes_is_asked_in_one(new_job: NewJob, tmp_path: Path) -> None:
    spread = new_job(num_processes=2, tensor_parallel=2, sequence_parallel=True)
    assert asked(spread, tmp_path).equal(asked(new_job(), tmp_path))


def test_a_file_that_is_no_job_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere.json"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: job file ")
    assert main([]) == 2


def test_a_job_that_shares_the_engine_s_experts_is_asked_with_its_own(new_job: NewJob, tmp_path: Path) -> None:
    assert asked(new_job("qwen3-moe", share_experts=True), tmp_path).equal(asked(new_job("qwen3-moe"), tmp_path))
