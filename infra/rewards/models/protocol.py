"""What the flow process and the program of a reward model say to each other; see program.py."""

from typing import NamedTuple

Score = tuple[float | None, str, str]
"""The model's output; or None with one of the reasons of `infra.rewards.outcome`, and what happened."""


class ModelSpec(NamedTuple):
    """What the program loads."""

    folder: str
    label: int
    device: str
    """cpu or cuda."""
    dtype: str
    """float32 or bfloat16."""
    num_threads: int
