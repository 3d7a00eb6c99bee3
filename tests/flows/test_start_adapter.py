"""A run that starts from an adapter of PEFT's, through whole steps: real trainer, scripted engine, a kill in the take-over, and a replay."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from flows.replay import replay_step
from flows.step import rl_step
from infra.config import RunConfig
from infra.processes import children
from infra.processes.children import ProgramFailed
from infra.records import StepReport
from infra.runs.manifest import Manifest, read_manifest
from infra.settings import settings
from infra.store.layout import adapter_folder, run_folder, step_folder_of

pytestmark = [pytest.mark.usefixtures("prefect_server", "ends_programs"), pytest.mark.timeout(900)]


@pytest.fixture
def config(scripted: RunConfig, model: Path, workspace: Path, tmp_path: Path) -> RunConfig:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(tmp_path / "sft")
    ours = scripted.trainer.lora.but(rank=4, alpha=8, target_modules=("q_proj", "v_proj"), start_from=str(tmp_path / "sft"))
    return scripted.but(trainer=scripted.trainer.but(lora=ours))


def step(config: RunConfig) -> StepReport:
    return rl_step.with_options(result_storage=settings().results)(config)


def manifest(run: str, index: int) -> Manifest:
    return read_manifest(step_folder_of(run, index))


def test_a_run_starts_from_it_after_a_kill_goes_on_and_can_be_replayed_without_the_folder(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = children.run

    def killed(argv: list[str], *arguments: Any, **named: Any) -> None:
        if "infra.megatron.program.adapter_canary" in argv:
            raise ProgramFailed("killed", -9)
        real(argv, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(children, "run", killed)
        with pytest.raises(ProgramFailed, match="killed"):
            step(config)
    assert not adapter_folder("r", 0).exists()
    step(config)
    shutil.rmtree(tmp_path / "sft")
    step(config)
    first, second = manifest("r", 0), manifest("r", 1)
    assert first.adapter_in.version == 0 and first.adapter_in.weights and first.adapter_in.canary
    assert (first.rollouts.adapter_sha256, first.batch.adapter_sha256) == (first.adapter_in.sha256,) * 2
    assert first.adapter_out.sha256 == second.adapter_in.sha256 != first.adapter_in.sha256
    assert second.adapter_in.num_optimizer_steps == 1
    replay_step.with_options(result_storage=settings().results)("r", 0, "again", "draw_prompts", [])
    again = manifest("again", 0)
    assert again.adapter_in.sha256 == first.adapter_in.sha256
    assert again.adapter_out.sha256 == first.adapter_out.sha256
    assert (run_folder("again") / "adapters/000000/state/canary.json").exists()
