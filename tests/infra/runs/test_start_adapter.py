"""A run that starts from an adapter of PEFT's: what becomes version 0, what is refused, and whose numbers agree."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from infra.config import RunConfig
from infra.megatron.protocol.job import Canary
from infra.processes import children
from infra.processes.children import ProgramFailed
from infra.records import TrainBatch
from infra.runs import start_adapter
from infra.runs.lineage import adapter_at
from infra.store.digests import sha256_of
from infra.store.files import path_of, read_json, record_of, verified, write
from infra.store.layout import StepFolder, adapter_folder
from tasks.train import train

TARGETS = ("q_proj", "v_proj", "down_proj")


@pytest.fixture(scope="module")
def adapter(random_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As supervised fine-tuning leaves it: written by PEFT, with a dropout and an alpha of its own."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(random_tiny, dtype=torch.float32)
    lora = LoraConfig(
        r=4, lora_alpha=12, target_modules=list(TARGETS), lora_dropout=0.1, task_type="CAUSAL_LM", init_lora_weights=False
    )
    folder = tmp_path_factory.mktemp("sft") / "adapter"
    get_peft_model(base, lora).save_pretrained(folder)
    return folder


@pytest.fixture
def config(random_tiny: Path, adapter: Path, workspace: Path) -> RunConfig:
    return started(RunConfig(name="mine", model=str(random_tiny)), adapter)


def started(config: RunConfig, adapter: Path, **lora: object) -> RunConfig:
    fields: dict[str, object] = {"start_from": str(adapter), "rank": 4, "alpha": 12, "target_modules": TARGETS}
    return config.but(trainer=config.trainer.but(lora=config.trainer.lora.but(**(fields | lora))))


def logprobs_of(model: torch.nn.Module, tokens: list[int]) -> list[float]:
    ids = torch.tensor([tokens])
    with torch.no_grad():
        values = torch.log_softmax(model(input_ids=ids).logits[0].double(), -1)
    found: list[float] = values[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    return found


def test_it_becomes_version_0_with_peft_s_own_numbers_in_its_canary(config: RunConfig, adapter: Path, random_tiny: Path) -> None:
    made = adapter_at(config, 0)
    assert (made.version, made.rank, made.alpha, made.target_modules) == (0, 4, 12, TARGETS)
    assert made.sha256 == sha256_of(adapter / "adapter_model.safetensors")
    assert made.served_name == f"mine-v000000-{made.sha256[:12]}"
    assert made.canary is not None and made.adapter_config is not None
    canary = Canary.model_validate(read_json(verified(made.canary)))
    base = AutoModelForCausalLM.from_pretrained(random_tiny, dtype=torch.float32).eval()
    without = logprobs_of(base, canary.tokens)
    peft = logprobs_of(PeftModel.from_pretrained(base, adapter).eval(), canary.tokens)
    assert canary.base_logprobs == pytest.approx(without, abs=1e-4)
    assert canary.adapter_logprobs == pytest.approx(peft, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(peft, without, strict=True)) > 0.1, "the adapter changes something"
    ours = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(random_tiny), path_of(made.adapter_config).parent
    ).eval()
    assert logprobs_of(ours, canary.tokens) == pytest.approx(peft, abs=1e-6)
    assert read_json(adapter_folder("mine", 0) / "state/start.json")["source"] == str(adapter)
    moments = [safetensors.torch.load_file(path_of(file)) for file in made.moments.values()]
    assert len(moments) == 2 and not any(value.any() for each in moments for value in each.values())


def test_it_is_taken_once_and_the_run_needs_the_folder_no_longer(
    config: RunConfig, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(adapter, tmp_path / "sft")
    config = started(config, copy)
    made = adapter_at(config, 0)
    monkeypatch.setattr(children, "run", None)
    assert adapter_at(config, 0) == made
    (copy / "adapter_model.safetensors").write_bytes(b"trained on")
    with pytest.raises(ValueError, match=rf"has changed since run 'mine' started from it: .* recorded was {made.sha256}"):
        start_adapter.check(config)
    shutil.rmtree(copy)
    start_adapter.check(config)
    assert adapter_at(config, 0) == made


def test_a_take_over_that_is_killed_leaves_nothing_and_is_made_again(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = children.run

    def killed(*arguments: Any, **named: Any) -> None:
        real(*arguments, **named)
        raise ProgramFailed("killed")

    monkeypatch.setattr(children, "run", killed)
    with pytest.raises(ProgramFailed, match="killed"):
        adapter_at(config, 0)
    assert not adapter_folder("mine", 0).exists()
    monkeypatch.setattr(children, "run", real)
    made = adapter_at(config, 0)
    assert adapter_at(config.but(name="other"), 0).canary == made.canary.model_copy(  # type: ignore[union-attr]
        update={"path": made.canary.path.replace("mine", "other")}  # type: ignore[union-attr]
    ), "the same numbers each time"


def test_training_starts_from_its_weights_and_the_trainer_agrees_with_peft(
    config: RunConfig, adapter: Path, random_tiny: Path
) -> None:
    """Samples with the log-probabilities of PEFT's own forward pass, and a learning rate that moves nothing."""
    config = config.but(trainer=config.trainer.but(learning_rate=1e-12, mode="per_step", max_mismatch=1e-4))
    made, path = adapter_at(config, 0), StepFolder.at("mine", 0).batch
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(random_tiny, dtype=torch.float32), adapter).eval()
    sequences = [[*range(300, 312 + n)] for n in range(2)]
    logprobs = [[0.0, *logprobs_of(peft, tokens)] for tokens in sequences]
    lengths = [len(tokens) for tokens in sequences]
    tensors = {
        "tokens": np.array([token for tokens in sequences for token in tokens], np.int64),
        "cu_seqlens": np.cumsum([0, *lengths], dtype=np.int64),
        "loss_mask": np.array([int(n > 0) for length in lengths for n in range(length)], np.uint8),
        "rollout_logprobs": np.array([value for values in logprobs for value in values], np.float32),
        "advantages": np.array(
            [value for length, value in zip(lengths, (1, -1), strict=True) for value in [value] * length], np.float32
        ),
    }
    about = {"adapter_version": "0", "adapter_sha256": made.sha256, "temperature": "1.0"}
    write(path, safetensors.numpy.save(tensors, about))
    num_tokens = sum(lengths)
    batch = TrainBatch(
        run="mine",
        step=0,
        adapter_version=0,
        adapter_sha256=made.sha256,
        file=record_of(path),
        num_sequences=2,
        num_tokens=num_tokens,
        num_loss_tokens=num_tokens - 2,
    )
    trained = train.fn(config.trainer, batch, made)
    assert (trained.version, trained.num_optimizer_steps) == (1, 1)
    before, after = (safetensors.torch.load_file(path_of(each.weights)) for each in (made, trained) if each.weights)
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name], after[name], atol=1e-9) for name in before)


def refusal_of(config: RunConfig) -> str:
    with pytest.raises(ValueError) as caught:
        start_adapter.check(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_rank_alpha_or_targets_are_named_with_what_to_set(config: RunConfig, adapter: Path) -> None:
    assert refusal_of(started(config, adapter, rank=8, alpha=16)) == (
        f"trainer.lora.start_from {str(adapter)!r} has rank 4, alpha 12 and targets q_proj, v_proj, down_proj; the run has rank 8, alpha 16 and "
        "targets q_proj, v_proj, down_proj: set --trainer.lora.rank 4 --trainer.lora.alpha 12 --trainer.lora.target_modules "
        '\'["q_proj", "v_proj", "down_proj"]\''
    )
    assert "the run has rank 4, alpha 12 and targets q_proj:" in refusal_of(started(config, adapter, target_modules=("q_proj",)))


def changed_copy(adapter: Path, target: Path, **fields: object) -> Path:
    copy = shutil.copytree(adapter, target)
    about = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(about | fields))
    return copy


def without_a_tensor(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(dict(list(tensors.items())[1:]), path)


def with_a_narrow_tensor(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = next(iter(tensors))
    safetensors.torch.save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, path)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "torn weights": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 20),
        "is no whole safetensors file",
    ),
    "a tensor less": (without_a_tensor, "has no tensor base_model.model.model.layers.0"),
    "another shape": (with_a_narrow_tensor, "for this model and rank it should be ("),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_folder_that_is_no_adapter_of_this_model_is_refused(
    config: RunConfig, adapter: Path, tmp_path: Path, kind: str
) -> None:
    breaks, message = BROKEN[kind]
    breaks(copy := shutil.copytree(adapter, tmp_path / "sft"))
    assert message in refusal_of(started(config, copy))


def test_what_is_more_than_a_plain_lora_is_refused(config: RunConfig, adapter: Path, tmp_path: Path) -> None:
    copy = changed_copy(adapter, tmp_path / "sft", use_dora=True)
    assert refusal_of(started(config, copy)) == f"trainer.lora.start_from: {copy}: use_dora True cannot be used, only False"


def test_a_folder_that_is_empty_or_not_there_is_said_with_what_is_needed(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    needed = "give the folder of a LoRA adapter as PEFT saves it, with adapter_config.json and adapter_model.safetensors"
    for name, why in {"empty": "has no adapter_config.json", "nowhere": "is no folder on this machine"}.items():
        assert refusal_of(started(config, tmp_path / name)) == f"trainer.lora.start_from: {tmp_path / name} {why}: {needed}"


@pytest.fixture
def other_model(random_tiny: Path, tmp_path: Path) -> Iterator[Path]:
    folder = shutil.copytree(random_tiny, tmp_path / "other")
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    yield folder


def test_an_adapter_of_another_base_model_is_refused(config: RunConfig, adapter: Path, other_model: Path, tmp_path: Path) -> None:
    copy = changed_copy(adapter, tmp_path / "sft", base_model_name_or_path=str(other_model))
    assert refusal_of(started(config, copy)).startswith(
        f"trainer.lora.start_from {str(copy)!r} was trained on base model {str(other_model)!r}, the run's is {config.model!r}: take that"
    )
    digest = changed_copy(adapter, tmp_path / "ours", base_model_name_or_path="sha256:" + "0" * 64)
    assert "was trained on base model 'sha256:000" in refusal_of(started(config, digest))
    start_adapter.check(started(config, changed_copy(adapter, tmp_path / "hub", base_model_name_or_path="Qwen/Qwen3-0.6B")))
