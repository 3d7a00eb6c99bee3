"""adapter_config.json of an adapter, as Hugging Face PEFT reads it. No torch here: the trainer and the import of an adapter write the same."""

from typing import Any

from infra.config import LoraConfig


def peft_config(base_model_id: str, lora: LoraConfig) -> dict[str, Any]:  # Any: JSON
    """Return the content of adapter_config.json. base_model_id: name on the hub, or folder."""
    alpha = lora.alpha
    return {
        "alpha_pattern": {},
        "base_model_name_or_path": base_model_id,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "rank_pattern": {},
        "target_modules": list(lora.target_modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
