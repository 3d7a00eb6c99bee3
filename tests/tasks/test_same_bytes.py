"""The files of a step hold the bytes that they held when these digests were taken: caches, manifests and replays compare them.

The samples are made by hand: an empty text, letters beyond ASCII, no reward, several parts of a reward, none, lengths that differ.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from shared import sample

from infra.config import BatchConfig, OverlongConfig, RewardConfig
from infra.data.prompts import Prompt
from infra.records import PromptBatch, Rollouts, ScoredRollouts
from infra.store.files import record_of, write_json_lines
from infra.store.samples import Sample, write_samples
from tasks.assemble import assemble
from tasks.score import score

PROMPTS = [Prompt(2**40 + n, n, f"2 + {n}?", f"#### {2 + n}", list(range(n + 1)), n) for n in range(3)]
TEXTS = ["#### 2", "", "caf\u00e9 \U0001f600\n#### 3", "#### 3", "no", "\\boxed{4}"]
WRITTEN_BY = "25.0.1"
"""The version of pyarrow that these digests were taken with; each writes its name into its files."""


@pytest.fixture(autouse=True)
def written_by_the_same_pyarrow() -> None:
    assert pyarrow.__version__ == WRITTEN_BY, f"the digests are those of pyarrow {WRITTEN_BY}: take them anew with the new lock"


def sampled() -> list[Sample]:
    """Two of each prompt, of one to six tokens."""
    return [
        replace(
            sample(PROMPTS[n // 2].prompt_id),
            sample_index=n % 2,
            prompt_tokens=PROMPTS[n // 2].prompt_tokens,
            output_tokens=[7 * k + n for k in range(n + 1)],
            output_logprobs=[-0.1 * k - n / 3 for k in range(n + 1)],
            finish_reason="length" if n == 5 else "stop",
            text=text,
        )
        for n, text in enumerate(TEXTS)
    ]


def rewarded_by_hand() -> list[Sample]:
    rewards = [1.0, None, 0.75, 0.1, -0.5, 0.0]
    parts = [{"right": 0.9, "brief": 0.1}, None, {"reward": 0.75}, {"z": 0.05, "a": 0.05}, {"reward": -0.5}, {}]
    return [replace(one, reward=reward, reward_parts=of_it) for one, reward, of_it in zip(sampled(), rewards, parts, strict=True)]


def test_samples(tmp_path: Path) -> None:
    with_advantages = [replace(one, advantage=n / 7) for n, one in enumerate(rewarded_by_hand())]
    found = [
        hashlib.sha256(write_samples(tmp_path / "x.parquet", samples).read_bytes()).hexdigest()[:16]
        for samples in (sampled(), rewarded_by_hand(), with_advantages, [])
    ]
    assert found == ["0cc7640e962cd87d", "094a3a76a231c679", "c9e8ec4e23ee5d2e", "85e472a38ac624e0"]


@pytest.mark.parametrize(("shuffle_seed", "digest"), [(None, "b71ecdea016cd5bb"), (5, "9a3cb2bbabfc3523")])
def test_scored_samples(workspace: Path, shuffle_seed: int | None, digest: str) -> None:
    said = record_of(write_samples(workspace / "samples.parquet", sampled()))
    asked = record_of(write_json_lines(workspace / "prompts.jsonl", (prompt._asdict() for prompt in PROMPTS)))
    about = {"run": "run", "step": 3, "num_prompts": 3}
    sampling = {"adapter_version": 1, "adapter_sha256": "abc", "group_size": 2, "temperature": 0.7, "num_samples": 6}
    rollouts = Rollouts(file=said, num_output_tokens=21, num_truncated=1, **about, **sampling)
    prompts = PromptBatch(file=asked, dataset_fingerprint="", first_row=0, **about)
    made = score.fn(RewardConfig(name="gsm8k_numeric", shuffle_seed=shuffle_seed), rollouts, prompts)
    assert made.file.sha256[:16] == digest


@pytest.mark.parametrize(
    ("config", "batch", "samples"),
    [
        (BatchConfig(), "b2c2604e2baf8b45", "97c08f8ae309bbee"),
        (
            BatchConfig(
                advantage="reinforce_pp",
                mask_truncated=True,
                drop_zero_std_groups=True,
                max_groups=2,
                overlong=OverlongConfig(max_output_tokens=5, buffer_tokens=3),
            ),
            "30e7f0e299d718c3",
            "6120f422ccf47c82",
        ),
    ],
)
def test_a_batch(workspace: Path, config: BatchConfig, batch: str, samples: str) -> None:
    judged = [replace(sample, reward=sample.reward or 0.0) for sample in rewarded_by_hand()]
    scored = ScoredRollouts(
        run="run",
        step=2,
        adapter_version=1,
        adapter_sha256="abc",
        file=record_of(write_samples(workspace / "scored.parquet", judged)),
        num_prompts=3,
        group_size=2,
        temperature=0.7,
        num_samples=6,
        mean_reward=0.5,
        std_reward=0.5,
        num_trainable_groups=3,
    )
    made = assemble.fn(config, scored)
    assert (made.file.sha256[:16], made.samples.sha256[:16]) == (batch, samples)
