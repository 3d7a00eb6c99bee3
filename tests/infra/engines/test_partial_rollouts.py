"""What was sampled outlives the process that asked for it: killed -9 in the middle of a rollout, then the same again."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.config import EngineConfig, SamplingConfig
from infra.data.prompts import Prompt, sample_seed
from infra.engines import open_engine
from infra.engines.interface import RolloutRequest, SampleSink
from infra.engines.journal import Journal
from infra.engines.server import server_process
from infra.failures import EngineUnavailable
from infra.records import AdapterVersion, PromptBatch
from infra.settings import CHECKOUT
from infra.store.files import read_json, record_of, write_json_lines
from infra.store.layout import StepFolder, step_folder
from tasks.roll_out import roll_out

MakeAdapter = Callable[[int], AdapterVersion]
SetFault = Callable[[str], None]
PROMPTS = [
    Prompt(prompt_id=n, row_number=n, question="?", answer="#### 4", prompt_tokens=[4, 5, 6 + n], seed=70 + n) for n in range(6)
]
SAMPLING = SamplingConfig(group_size=4, max_output_tokens=8)
SAMPLE = """
import sys
from infra.config import EngineConfig, SamplingConfig
from infra.records import AdapterVersion, PromptBatch
from tasks.roll_out import roll_out
types = (EngineConfig, SamplingConfig, PromptBatch, AdapterVersion)
roll_out.fn(*(kind.model_validate_json(text) for kind, text in zip(types, sys.argv[1:], strict=True)))
"""

pytestmark = pytest.mark.usefixtures("over_scripted_server")


@pytest.fixture
def config(engine_config: EngineConfig) -> EngineConfig:
    return engine_config.but(max_running_requests=1)


def drawn(run: str, workspace: Path) -> PromptBatch:
    path = write_json_lines(workspace / f"runs/{run}/steps/000000/prompts.jsonl", [prompt._asdict() for prompt in PROMPTS])
    return PromptBatch(run=run, step=0, file=record_of(path), num_prompts=6, dataset_fingerprint="f", first_row=0)


def answered(workspace: Path) -> list[str]:
    """What the server was asked since the last call: `leader` or a sample's seed."""
    path = workspace / "fault.answered"
    lines = path.read_text().splitlines()
    path.write_text("")
    return lines


def num_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def test_after_kill_9_of_the_asking_process_only_the_missing_samples_are_generated(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path
) -> None:
    adapter, prompts = scripted_adapter(1), drawn("r", workspace)
    undisturbed = roll_out.fn(config, SAMPLING, drawn("undisturbed", workspace), adapter)
    journal = StepFolder.of(prompts).journal
    set_fault("slow")
    arguments = [each.model_dump_json() for each in (config, SAMPLING, prompts, adapter)]
    child = subprocess.Popen(
        [sys.executable, "-c", SAMPLE, *arguments], cwd=CHECKOUT, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}
    )
    deadline = time.monotonic() + 120
    while num_lines(journal) < 10:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    child.kill()
    child.wait()
    num_kept = num_lines(journal) - 1
    while answered(workspace):  # what it had asked for is answered, a sample every 0.2 s
        time.sleep(2)
    set_fault("")
    made = roll_out.fn(config, SAMPLING, prompts, adapter)
    asked = answered(workspace)
    assert made.file.sha256 == undisturbed.file.sha256
    assert 9 <= num_kept < 24
    assert read_json(step_folder(prompts) / "measures/roll_out.json")["num_kept"] == num_kept
    assert len([what for what in asked if what != "leader"]) == 24 - num_kept
    state = server_process.recorded()
    assert state is not None and state.launch == 1, "the server that lives was adopted"


def test_prompts_that_have_all_their_samples_are_not_sent_first_again(
    config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    adapter, path = scripted_adapter(1), workspace / "samples.journal"
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    whole, _ = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
    answered(workspace)
    with Journal(path, {}) as journal:
        for sample in whole:
            if sample.prompt_id != 3 and (sample.prompt_id, sample.sample_index) != (5, 2):
                journal.add(sample)
    with Journal(path, {}) as journal:
        samples, how = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter), SampleSink(journal))
    assert samples == whole
    assert how.num_kept == 19
    missing = [sample_seed(73, index) for index in range(4)] + [sample_seed(75, 2)]
    assert sorted(answered(workspace)) == sorted(["leader", "leader", *map(str, missing)])


@pytest.mark.parametrize("fault", ["connection reset", "HTTP 503", "hangs", "dies"])
def test_each_way_to_fail_in_the_middle_keeps_what_was_finished(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path, fault: str
) -> None:
    adapter, impatient = scripted_adapter(1), config.but(request_timeout_s=1)
    undisturbed = roll_out.fn(impatient, SAMPLING, drawn("undisturbed", workspace), adapter)
    set_fault(f"{fault} after {24 + 9}")
    prompts = drawn("r", workspace)
    with pytest.raises(EngineUnavailable):
        roll_out.fn(impatient, SAMPLING, prompts, adapter)
    num_kept = num_lines(StepFolder.of(prompts).journal) - 1
    assert 8 <= num_kept <= 10
    answered(workspace)
    made = roll_out.fn(impatient, SAMPLING, prompts, adapter)  # the fault begins only after 33 samples of this new server
    assert made.file.sha256 == undisturbed.file.sha256
    assert len([what for what in answered(workspace) if what != "leader"]) == 24 - num_kept


@pytest.mark.parametrize("kind", ["scripted", "sglang"])
def test_with_spare_prompts_a_rollout_ends_when_enough_groups_are_whole(
    config: EngineConfig,
    scripted_adapter: MakeAdapter,
    set_fault: SetFault,
    workspace: Path,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    adapter = scripted_adapter(1)
    engine = open_engine(config.but(kind=kind, max_running_requests=12), adapter)
    engine.wake()
    engine.load_adapter(adapter)
    whole, _ = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
    set_fault("endless from 10")  # the last two prompts; all samples are under way at once
    with Journal(workspace / "samples.journal", {}) as journal:
        some, how = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter, 2), SampleSink(journal))
    gc.collect()
    assert "never retrieved" not in caplog.text, "what is aborted is no error"
    groups = {sample.prompt_id for sample in some}
    assert len(groups) == 4 and some == [sample for sample in whole if sample.prompt_id in groups]
    assert how.num_new_output_tokens >= sum(len(sample.output_tokens) for sample in some)
    if kind == "sglang":
        broken_off = [
            line.split()[1] for line in (workspace / "fault.control").read_text().splitlines() if "/abort_request" in line
        ]
        assert len(set(broken_off)) == 8 and "all" not in broken_off, "each by its own id"
    with Journal(workspace / "samples.journal", {}) as journal:
        again, how = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter, 2), SampleSink(journal))
    assert again == some and how.num_new_output_tokens == 0


def test_spare_groups_that_died_with_the_engine_are_not_needed(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path
) -> None:
    adapter = scripted_adapter(1)
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    set_fault("dies after 9")
    with pytest.raises(EngineUnavailable), Journal(workspace / "samples.journal", {}) as journal:
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter, 2), SampleSink(journal))
    set_fault("")
    engine.wake()
    engine.load_adapter(adapter)
    with Journal(workspace / "samples.journal", {}) as journal:
        samples, how = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter, 2), SampleSink(journal))
    assert len(samples) == 16 and len({sample.prompt_id for sample in samples}) == 4
    assert 0 < how.num_kept < 16


def test_a_step_with_spare_prompts_has_as_many_groups_as_were_asked_for(
    config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    prompts = drawn("r", workspace).model_copy(update={"num_oversampled_prompts": 1})
    made = roll_out.fn(config, SAMPLING, prompts, scripted_adapter(1))
    assert (made.num_prompts, made.num_samples) == (5, 20)
