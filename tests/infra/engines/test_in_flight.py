"""In-flight updates over scripted servers: each token has the log-probability that its own adapter gives it, with one server and with two."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.config import EngineConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.records import AdapterSwitch, AdapterVersion, PromptBatch
from infra.store.files import path_of, read_json, record_of, write_json_lines
from infra.store.layout import StepFolder
from infra.store.samples import read_samples
from tasks.roll_out import roll_out
from tasks.support.rollouts import in_flight

MakeAdapter = Callable[[int], AdapterVersion]
SetFault = Callable[[str], None]
NUM_PROMPTS, GROUP_SIZE = 4, 4
NUM_SAMPLES = NUM_PROMPTS * GROUP_SIZE
SAMPLING = SamplingConfig(group_size=GROUP_SIZE, max_output_tokens=8)
AT_SWITCH, HALF_A_SAMPLE_S = 5, 0.1
"""Samples that have been answered half a sample before the newer adapter comes: requests of equal length end together."""


@pytest.mark.parametrize(("replicas", "pause_at"), [(1, 0), (2, 0), (2, 3)])
@pytest.mark.usefixtures("over_scripted_server")
def test_each_token_has_the_log_probability_of_the_adapter_on_record(
    replicas: int,
    pause_at: int,
    engine_config: EngineConfig,
    scripted_adapter: MakeAdapter,
    scripted_logprob: Callable[[list[int], str | None], float],
    set_fault: SetFault,
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, newer = scripted_adapter(1), scripted_adapter(2)
    answered = workspace / "fault.answered"

    reached_at: list[float] = []

    def newer_adapter(switch: AdapterSwitch) -> AdapterVersion | None:
        lines = answered.read_text().splitlines() if answered.exists() else []
        if sum(line != "leader" for line in lines) >= AT_SWITCH:
            reached_at.append(time.monotonic())
        return newer if reached_at and time.monotonic() - reached_at[0] > HALF_A_SAMPLE_S else None

    monkeypatch.setattr(in_flight, "newer_adapter", newer_adapter)
    monkeypatch.setattr(in_flight.lineage, "adapter_after", lambda run, step: newer)
    set_fault("slow")
    config = engine_config.but(
        kind="sglang", replicas=replicas, max_running_requests=1, deterministic=bool(pause_at), request_timeout_s=30
    )
    rows = [Prompt(n, n, "?", "#### 4", [4, 5, 6 + n], seed=70 + n)._asdict() for n in range(NUM_PROMPTS)]
    path = write_json_lines(workspace / "runs/r/steps/000002/prompts.jsonl", rows)
    prompts = PromptBatch(run="r", step=2, file=record_of(path), num_prompts=NUM_PROMPTS, dataset_fingerprint="f", first_row=0)
    made = roll_out.fn(config, SAMPLING, prompts, old, switch=AdapterSwitch(run="r", made_by_step=1, pause_at=pause_at))
    samples = read_samples(path_of(made.file))
    assert made.adapter_version == 2
    assert len({(each.prompt_id, each.sample_index) for each in samples}) == len(samples) == NUM_SAMPLES
    folders = {adapter.sha256: str(workspace / f"runs/r/adapters/{adapter.version:06d}") for adapter in (old, newer)}
    for sample in samples:
        tokens = [int(token) for token in sample.output_tokens]
        by = [sample.older_adapter_sha256 if n < sample.num_older_tokens else sample.adapter_sha256 for n in range(len(tokens))]
        expected = [scripted_logprob([*map(int, sample.prompt_tokens), *tokens[:n]], folders[by[n]]) for n in range(len(tokens))]
        assert [float(value) for value in sample.output_logprobs] == pytest.approx(expected)
    older = [each.num_older_tokens for each in samples]
    mixed = [each.num_older_tokens for each in samples if 0 < each.num_older_tokens < len(each.output_tokens)]
    figures = read_json(StepFolder.of(prompts).path / "measures/roll_out.json")
    assert figures[in_flight.RECOMPUTED] == sum(mixed)
    assert figures["first_token_at"] <= figures[in_flight.SWITCHED_AT] - figures[in_flight.SWITCH_S] < figures["last_token_at"]
    if pause_at:
        assert set(older) == {pause_at} and len(mixed) == NUM_SAMPLES
    else:
        assert mixed and 0 in older and max(older) == 5
