"""What several test modules and drills need; on the path as `shared`."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from infra.samples import Sample

SMALL_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 512,
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
"""config.json of a model with the vocabulary of the tiny ones."""


def becomes(claim: Callable[[], bool], within_s: float = 20) -> bool:
    """Whether the claim holds before the time is over."""
    deadline = time.monotonic() + within_s
    while not claim():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_gone(pid: int) -> bool:
    """Ended; whether its parent has asked for its exit status does not matter."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def sample(prompt_id: int = 0) -> "Sample":
    """Of one token, finished, without a reward."""
    from infra.samples import Sample

    return Sample(
        prompt_id=prompt_id,
        sample_index=0,
        prompt_tokens=[1],
        output_tokens=[3],
        output_logprobs=[-0.5],
        finish_reason="stop",
        adapter_version=1,
        adapter_sha256="abc",
    )
