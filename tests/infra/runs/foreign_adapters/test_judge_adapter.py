"""An adapter of PEFT's that judges for a run: its copy and canary, what is refused, and what its digest decides."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from infra.config import JudgeConfig, RewardConfig, RunConfig
from infra.config.tools.overrides import one_line
from infra.megatron.protocol.job import Canary
from infra.models import base_model
from infra.processes import children
from infra.processes.children import ProgramFailed
from infra.records import BaseModelRef
from infra.runs.evaluations import eval_digest
from infra.runs.foreign_adapters import judge_adapter
from infra.store.digests import sha256_of
from infra.store.files import path_of, read_json, verified
from tasks import rewards
from tasks.support.preflight import check, check_evaluation

TARGETS = ("q_proj", "v_proj")


@pytest.fixture(scope="module")
def adapter(random_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(random_tiny, dtype=torch.float32)
    lora = LoraConfig(r=4, lora_alpha=12, target_modules=list(TARGETS), task_type="CAUSAL_LM", init_lora_weights=False)
    folder = tmp_path_factory.mktemp("judge") / "adapter"
    get_peft_model(base, lora).save_pretrained(folder)
    return folder


def judge_of(folder: Path) -> JudgeConfig:
    return JudgeConfig.model_validate({"by": "engine", "adapter": str(folder), "rubric": "{completion}"})


def run_of(model: Path, folder: Path, **engine: object) -> RunConfig:
    reward = RewardConfig(name="rubric", judge=judge_of(folder).but(max_output_tokens=16))
    config = RunConfig(name="r", model=str(model), reward=reward)
    return config.but(engine=config.engine.but(**engine))


@pytest.fixture
def base(random_tiny: Path, workspace: Path) -> BaseModelRef:
    return base_model.reference(str(random_tiny))


def logprobs_of(model: torch.nn.Module, tokens: list[int]) -> list[float]:
    ids = torch.tensor([tokens])
    with torch.no_grad():
        values = torch.log_softmax(model(input_ids=ids).logits[0].double(), -1)
    found: list[float] = values[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    return found


def test_it_is_copied_once_with_peft_s_own_numbers_in_its_canary_under_a_name_of_its_digest(
    base: BaseModelRef, adapter: Path, random_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = judge_adapter.prepared(judge_of(adapter), base)
    assert (made.rank, made.alpha, made.target_modules, made.sha256) == (
        *(4, 12, TARGETS),
        sha256_of(adapter / "adapter_model.safetensors"),
    )
    assert made.served_name == f"{made.run}-v000001-{made.sha256[:12]}" and made.run.startswith("judge-")
    assert made.canary is not None and made.adapter_config is not None
    canary = Canary.model_validate(read_json(verified(made.canary)))

    def peft(folder: Path) -> list[float]:
        model = AutoModelForCausalLM.from_pretrained(random_tiny, dtype=torch.float32).eval()
        return logprobs_of(PeftModel.from_pretrained(model, folder).eval(), canary.tokens)

    expected = peft(adapter)
    assert canary.adapter_logprobs == pytest.approx(expected, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(expected, canary.base_logprobs, strict=True)) > 0.1, "the adapter changes something"
    assert peft(path_of(made.adapter_config).parent) == pytest.approx(expected, abs=1e-6), "what is served is what was given"
    print("largest difference from PEFT", max(abs(a - b) for a, b in zip(expected, canary.adapter_logprobs, strict=True)))
    monkeypatch.setattr(children, "run", None)
    assert judge_adapter.prepared(judge_of(adapter), base) == made


def test_a_copy_that_is_killed_leaves_nothing_and_one_that_was_changed_is_refused(
    base: BaseModelRef, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = judge_of(adapter)

    def killed(*arguments: Any, **named: Any) -> None:
        raise ProgramFailed("killed")

    with monkeypatch.context() as patch:
        patch.setattr(children, "run", killed)
        with pytest.raises(ProgramFailed, match="killed"):
            judge_adapter.prepared(judge, base)
    made = judge_adapter.prepared(judge, base)
    assert made.weights is not None and made.canary is not None
    for file in (made.weights, made.canary):
        path = path_of(file)
        before = path.read_bytes()
        path.write_bytes(b"another")
        with pytest.raises(
            ValueError, match=rf"reward.judge.adapter .* was changed: its digest is .*, recorded was {file.sha256}"
        ):
            judge_adapter.prepared(judge, base)
        path.write_bytes(before)
    assert judge_adapter.prepared(judge, base) == made


def checked(config: RunConfig) -> None:
    judge_adapter.check(config, config.reward)


def without_a_tensor(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    safetensors.torch.save_file(dict(list(tensors.items())[1:]), folder / "adapter_model.safetensors")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no adapter": (
        lambda folder: (folder / "adapter_config.json").unlink(),
        r"reward.judge.adapter: .* has no adapter_config.json",
    ),
    "no plain LoRA": (lambda folder: _set(folder, use_dora=True), "reward.judge.adapter: .*use_dora True cannot be used"),
    "rank": (lambda folder: _set(folder, r=32), "has rank 32, engine.max_lora_rank is 16: raise it"),
    "base model": (
        lambda folder: _set(folder, base_model_name_or_path="sha256:00"),
        "was trained on base model 'sha256:00', the run's is",
    ),
    "a tensor less": (without_a_tensor, "has no tensor base_model.model.model.layers.0"),
}


def _set(folder: Path, **fields: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_cannot_judge_is_refused_before_the_run(
    workspace: Path, random_tiny: Path, adapter: Path, tmp_path: Path, case: str
) -> None:
    breaks, message = REFUSED[case]
    checked(run_of(random_tiny, adapter))
    breaks(copy := shutil.copytree(adapter, tmp_path / "copy"))
    with pytest.raises(ValueError, match=message) as caught:
        checked(run_of(random_tiny, copy))
    assert "\n" not in str(caught.value)


def test_the_checks_before_a_run_and_of_an_evaluation_set_look_at_it(workspace: Path, random_tiny: Path, adapter: Path) -> None:
    config = run_of(random_tiny, Path("/nowhere"), kind="scripted", max_context_tokens=512)
    message = "reward.judge.adapter: /nowhere is no folder on this machine: give the folder of a LoRA adapter"
    with pytest.raises(ValueError, match=message):
        check(config)
    of_a_set = config.but(
        reward=config.reward.but(name="gsm8k_numeric"), evaluation={"sets": [{"name": "judged", "reward": "rubric"}]}
    )
    check(of_a_set)
    with pytest.raises(ValueError, match=f"evaluation set 'judged': {message}"):
        check_evaluation(of_a_set)


def test_targets_that_the_engine_is_not_launched_for_and_another_judge_are_refused(
    workspace: Path, random_tiny: Path, adapter: Path
) -> None:
    config = run_of(random_tiny, adapter)
    narrow = config.but(trainer=config.trainer.but(lora=config.trainer.lora.but(target_modules=("q_proj", "o_proj"))))
    with pytest.raises(ValueError, match=r"is on v_proj too, .* q_proj, o_proj: add them to trainer.lora.target_modules"):
        checked(narrow)
    with pytest.raises(ValidationError) as caught:
        judge_of(adapter).but(by="endpoint")
    assert "with reward.judge.by 'endpoint': an adapter is served by the run's own engine" in one_line(caught.value)
    checked(config.but(reward=RewardConfig(judge=judge_of(Path("/nowhere")))))  # where no model judges


def test_its_content_is_a_part_of_what_the_reward_is_and_a_run_without_one_keeps_its_digests(
    workspace: Path, random_tiny: Path, adapter: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(adapter, tmp_path / "copy")
    before = rewards.source_digests(run_of(random_tiny, copy).reward)
    assert before == rewards.source_digests(run_of(random_tiny, adapter).reward)
    _set(copy, lora_alpha=13)
    assert rewards.source_digests(run_of(random_tiny, copy).reward) != before

    def evaluated(judge: JudgeConfig) -> str:
        config = run_of(random_tiny, adapter)
        (found,) = config.but(reward=config.reward.but(judge=judge)).eval_configs.values()
        return eval_digest(found)

    with_base = judge_of(adapter).but(adapter="", max_output_tokens=16)
    as_before = "081c4ef778df0621"  # before there were adapters that judge
    assert evaluated(with_base) == as_before != evaluated(with_base.but(adapter=str(adapter)))
