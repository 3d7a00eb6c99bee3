"""GRPO steps by TRL, in its own environment: `beside_trl.py` starts this and reads the lines that it prints, one for each finished step."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def reward_of(path: str) -> Any:
    """The rewards of Ratchet, which import nothing but the standard library."""
    spec = importlib.util.spec_from_file_location("gsm8k", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def rewards(completions: list[Any], answer: list[str], **_: object) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [module.numeric(question="", completion=text, answer=right) for text, right in zip(texts, answer, strict=True)]

    return rewards


def main() -> None:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    given: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(given["num_threads"])

    class Tell(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
        def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
            print("STEP", state.global_step, flush=True)

    config = GRPOConfig(**given["grpo"], use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True)
    trainer = GRPOTrainer(
        model=given["model"],
        args=config,
        reward_funcs=reward_of(given["rewards"]),
        train_dataset=Dataset.from_list(given["prompts"]),
        peft_config=LoraConfig(**given["lora"]),
        callbacks=[Tell()],
    )
    trainer.train()
    print("REWARDS", json.dumps([row["reward"] for row in trainer.state.log_history if "reward" in row]), flush=True)


if __name__ == "__main__":
    main()
