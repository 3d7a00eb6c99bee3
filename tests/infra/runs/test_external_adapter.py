"""Which PEFT adapters can be served and merged as they are."""

from pathlib import Path

import pytest

from infra.runs.external_adapter import peft_problem
from infra.store.files import write_json

PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": True}


def problem_with(folder: Path, **fields: object) -> str | None:
    write_json(folder / "adapter_config.json", PLAIN | fields)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return peft_problem(folder)


def test_a_plain_adapter_is_one(tmp_path: Path) -> None:
    assert problem_with(tmp_path) is None
    assert problem_with(tmp_path, init_lora_weights="gaussian", layer_replication=None, lora_bias=False, use_qalora=False) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("rank_pattern", {"q_proj": 4}),
        ("layer_replication", [[0, 4], [2, 5]]),
        ("lora_bias", True),
        ("alora_invocation_tokens", [1, 2]),
        ("use_qalora", True),
        ("trainable_token_indices", [7]),
        ("target_parameters", ["experts.down_proj"]),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("target_modules", ["lm_head"]),
        ("r", None),
        ("r", 0),
        ("lora_alpha", "16"),
    ],
)
def test_what_is_more_than_a_plain_adapter_is_refused_by_its_field(tmp_path: Path, field: str, value: object) -> None:
    assert f"{tmp_path}: {field} {value!r} " in (problem_with(tmp_path, **{field: value}) or "")


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    problem_with(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    problem = peft_problem(tmp_path)
    assert problem and problem.startswith(
        f"{tmp_path}/adapter_config.json holds no JSON object: give the folder of a LoRA adapter"
    )
