"""GRPO steps by TRL, in its own environment: `beside_trl.py` (a CPU) and `tests/gpu/peers.py` start this and read the lines that it prints.

STEP n for each finished step; with vLLM `PART name seconds` for each generation and each transfer of weights; at the end REWARDS as JSON.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def reward_of(path: str, name: str) -> Any:
    """A reward of Ratchet, whose file imports nothing but the standard library."""
    spec = importlib.util.spec_from_file_location("reward", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name)

    def rewards(completions: list[Any], answer: list[str], **_: object) -> list[float]:
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        return [function(question="", completion=text, answer=right) for text, right in zip(texts, answer, strict=True)]

    return rewards


def timed(owner: Any, name: str) -> None:
    """Print the seconds of each call of a method."""
    call: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            print("\nPART", name, f"{time.monotonic() - begin:.3f}", flush=True)

    setattr(owner, name, wrapped)


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
            print("\nSTEP", state.global_step, flush=True)

    config = GRPOConfig(**given["grpo"], report_to="none", save_strategy="no", disable_tqdm=True)
    trainer = GRPOTrainer(
        model=given["model"],
        args=config,
        reward_funcs=reward_of(given["reward"]["file"], given["reward"]["function"]),
        train_dataset=Dataset.from_list(given["prompts"]),
        peft_config=LoraConfig(**given["lora"]),
        callbacks=[Tell()],
    )
    if config.use_vllm:
        for name in ("generate", "sync_weights"):
            timed(trainer.vllm_generation, name)
    trainer.train()
    print("REWARDS", json.dumps([row["reward"] for row in trainer.state.log_history if "reward" in row]), flush=True)


if __name__ == "__main__":
    main()
