"""A reward model: its scores are those of transformers, its program costs no score that can be had, and torch stays in it."""

import json
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError
from reward_models import made
from shared import becomes, is_gone, sample, untrained_adapter

from infra.config import EngineConfig, EvaluationConfig, RewardConfig, RunConfig
from infra.config.tools.overrides import one_line
from infra.data.prompts import Prompt
from infra.engines.scripted import ScriptedEngine
from infra.failures import RewardFailed, classify
from infra.models import base_model
from infra.processes import gpu_lock, gpu_programs
from infra.records import PromptBatch
from infra.rewards.models import scorer, scoring
from infra.rewards.models.batches import batches_of, tokens_of
from infra.rewards.models.scorer import ScorerProgram
from infra.rewards.outcome import Outcome
from infra.rewards.scores import Key
from infra.runs.evaluations import eval_digest
from infra.runs.lineage import adapter_at
from infra.settings import CHECKOUT
from infra.store import code_digest
from infra.store.files import record_of, write_json_lines
from infra.store.samples import Sample
from infra.telemetry import program_versions
from tasks import rewards
from tasks.evaluations.evaluate_adapter import evaluate_adapter
from tasks.rewards import by_reward_model
from tasks.rewards.ahead import scored_ahead
from tasks.rewards.apply import judged

PROMPTS = [Prompt(n, n, f"What is {n} + 1?", str(n + 1), [1], 0) for n in range(4)]
WORDS = ("It is", "I think that it is", "No idea, but perhaps it is rather", "")
INPUTS = {"samples": "s", "prompts": "p"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(autouse=True)
def _ends_programs(workspace: Path) -> Iterator[None]:
    yield
    scorer.close_all()


def samples_of(num_prompts: int = 4, size: int = 4) -> list[Sample]:
    return [
        replace(sample(prompt_id=p), prompt_id=p, sample_index=i, text=f"{WORDS[i % 4]} {p + i}")
        for p in range(num_prompts)
        for i in range(size)
    ]


def config_of(folder: Path, **fields: object) -> RewardConfig:
    own = {name: fields.pop(name) for name in ("timeout_s", "task_timeout_s", "max_unjudged_frac", "functions") if name in fields}
    model = {"path": str(folder), "max_tokens": 128, "max_tokens_per_batch": 256} | fields
    return RewardConfig.model_validate({"name": "reward_model", "model": model, **own})


def judged_in(folder: Path, config: RewardConfig, samples: Sequence[Sample] | None = None, **how: bool) -> list[Sample]:
    return judged(config, samples or samples_of(), PROMPTS, folder / "j", INPUTS, **how)


def rewards_in(folder: Path, config: RewardConfig, samples: Sequence[Sample] | None = None) -> list[float | None]:
    return [each.reward for each in judged_in(folder, config, samples)]


def by_transformers(folder: Path, samples: Sequence[Sample], label: int = 0) -> list[float]:
    """Each conversation alone, as the library's documentation shows it."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = []
    for each in samples:
        chat = [
            {"role": "user", "content": PROMPTS[each.prompt_id].question},
            {"role": "assistant", "content": each.text},
        ]
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            found.append(float(model(**ids).logits[0, label]))
    return found


@pytest.mark.parametrize(
    ("kind", "fields", "label"),
    [("llama", {}, 0), ("qwen2", {"num_labels": 3}, 2), ("qwen2", {"pad_token_id": None}, 0)],
    ids=["llama", "qwen2, the third of three outputs", "qwen2 without padding"],
)
def test_scores_are_those_of_transformers(workspace: Path, kind: str, fields: dict[str, object], label: int) -> None:
    folder = made(kind, workspace / "model", **fields)
    samples = samples_of()
    found = rewards_in(workspace, config_of(folder, label=label), samples)
    expected = by_transformers(folder, samples, label)
    assert found == pytest.approx(expected, abs=1e-6) and len({round(each, 3) for each in expected}) > 8


def asked_of(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The batches that programs are asked for from here on."""
    batches: list[list[list[int]]] = []
    ask = ScorerProgram.ask

    def noted(self: ScorerProgram, rows: Sequence[Sequence[int]], timeout_s: float) -> Any:
        batches.append([list(row) for row in rows])
        return ask(self, rows, timeout_s)

    monkeypatch.setattr(ScorerProgram, "ask", noted)
    return batches


def test_a_scoring_goes_on_at_the_missing_batches_with_the_same_bits(
    workspace: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, samples = config_of(llama), samples_of()
    undisturbed = rewards_in(workspace / "a", config, samples) if (workspace / "a").mkdir() is None else []
    batches, whole = asked_of(monkeypatch), 0
    with pytest.raises(KeyboardInterrupt):
        taken: list[int] = []

        def stop_at_the_sixth(journal: Any, key: Key, outcome: Outcome) -> None:
            add(journal, key, outcome)
            taken.append(key[2])
            if len(taken) == 6:
                raise KeyboardInterrupt

        add = by_reward_model.ScoreJournal.add
        with monkeypatch.context() as patch:
            patch.setattr(by_reward_model.ScoreJournal, "add", stop_at_the_sixth)
            rewards_in(workspace, config, samples)
    before, whole = len(batches), len(batches_of([len(row) for row in rows_of(llama, samples)], 256))
    assert rewards_in(workspace, config, samples) == undisturbed
    assert 1 < before < whole and len(batches) - before <= whole - before + 1, "one batch was kept in part"


def rows_of(folder: Path, samples: Sequence[Sample]) -> list[list[int]]:
    chats = [
        [{"role": "user", "content": PROMPTS[each.prompt_id].question}, {"role": "assistant", "content": each.text}]
        for each in samples
    ]
    return tokens_of(folder, chats)


PROGRAM = """
import sys, time
sys.path[:0] = sys.argv[3:]
from test_reward_model import *
add = by_reward_model.ScoreJournal.add
def slow(self, key, outcome):
    add(self, key, outcome)
    time.sleep(0.2)
    print("scored", flush=True)
by_reward_model.ScoreJournal.add = slow
rewards_in(Path(sys.argv[1]), config_of(Path(sys.argv[2])))
"""


def test_a_flow_that_is_killed_takes_its_reward_model_with_it_and_the_next_one_scores_only_what_is_missing(
    workspace: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "a").mkdir()
    undisturbed = rewards_in(workspace / "a", config_of(llama))
    scorer.close_all()
    paths = [str(CHECKOUT / "tests/tasks"), str(CHECKOUT / "tests"), str(CHECKOUT)]
    argv = [sys.executable, "-c", PROGRAM, str(workspace), str(llama), *paths]
    flow = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert flow.stdout
    for _ in range(5):
        assert flow.stdout.readline() == "scored\n"
    (program,) = [each for each in psutil.Process(flow.pid).children() if scorer.PROGRAM in each.cmdline()]
    flow.kill()
    flow.wait()
    psutil.wait_procs([program], timeout=10)
    assert is_gone(program.pid)
    journal = (workspace / "j").read_text().splitlines()[1:]
    batches = asked_of(monkeypatch)
    assert rewards_in(workspace, config_of(llama)) == undisturbed
    asked = sum(map(len, batches))
    most = max(len(batch) for batch in batches_of([len(row) for row in rows_of(llama, samples_of())], 256))
    assert 5 <= len(journal) < 16 and asked <= 16 - len(journal) + most - 1


def test_no_process_of_the_flow_imports_torch(workspace: Path, llama: Path) -> None:
    program = (
        "import sys; sys.path[:0] = sys.argv[3:]\nfrom test_reward_model import *\n"
        "assert None not in rewards_in(Path(sys.argv[1]), config_of(Path(sys.argv[2])))\nassert 'torch' not in sys.modules\n"
    )
    paths = [str(CHECKOUT / "tests/tasks"), str(CHECKOUT / "tests"), str(CHECKOUT)]
    done = subprocess.run([sys.executable, "-c", program, str(workspace), str(llama), *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def struck(monkeypatch: pytest.MonkeyPatch, strike: Callable[[psutil.Process, Sequence[Sequence[int]]], None]) -> None:
    """Strike the program whenever it is about to be asked."""
    ask = ScorerProgram.ask

    def strike_and_ask(self: ScorerProgram, rows: Sequence[Sequence[int]], timeout_s: float) -> Any:
        strike(psutil.Process(self._process.pid), rows)
        return ask(self, rows, timeout_s)

    monkeypatch.setattr(ScorerProgram, "ask", strike_and_ask)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_program_that_is_lost_once_changes_no_score(
    workspace: Path, llama: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "a").mkdir()
    config = config_of(llama, timeout_s=3.0, max_unjudged_frac=0.0)
    undisturbed, num = rewards_in(workspace / "a", config), 0

    def third(process: psutil.Process, rows: Sequence[Sequence[int]]) -> None:
        nonlocal num
        num += 1
        if num == 3:
            process.send_signal(how)

    struck(monkeypatch, third)
    assert rewards_in(workspace, config) == undisturbed and num > 3
    assert len(gpu_programs.programs()) == 1, "the one that was lost has left nothing"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        pytest.param(signal.SIGKILL, "died", id="killed"),
        pytest.param(signal.SIGSTOP, "time-out", id="hangs", marks=pytest.mark.full),
    ],
)
def test_a_sample_that_ends_or_hangs_the_program_each_time_costs_itself_alone(
    workspace: Path, llama: Path, how: signal.Signals, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "a").mkdir()
    config, samples = config_of(llama, timeout_s=2.0, max_unjudged_frac=0.1), samples_of()
    undisturbed = rewards_in(workspace / "a", config, samples)
    bad = rows_of(llama, samples)[6]
    struck(monkeypatch, lambda process, rows: process.send_signal(how) if bad in rows else None)
    found = judged_in(workspace, config, samples)
    assert [(n, each.unjudged) for n, each in enumerate(found) if each.reward is None] == [(6, reason)]
    others = [n for n in range(16) if n != 6]
    assert [found[n].reward for n in others] == pytest.approx([undisturbed[n] for n in others], abs=1e-6)


def test_a_program_that_hangs_before_it_has_read_a_long_batch_is_late_too(workspace: Path, llama: Path) -> None:
    program = scorer.opened(config_of(llama))
    psutil.Process(program._process.pid).suspend()
    with pytest.raises(scorer.ScorerLost, match=r"gave no result in 0\.5 s"):
        program.ask([[7] * 100_000], timeout_s=0.5)
    assert gpu_programs.programs() == []


def test_at_the_deadline_of_the_scoring_what_has_no_score_is_unjudged_and_scored_by_the_next_attempt(
    workspace: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "a").mkdir()
    undisturbed, num = rewards_in(workspace / "a", config_of(llama)), 0

    def third(process: psutil.Process, rows: Sequence[Sequence[int]]) -> None:
        nonlocal num
        num += 1
        if num == 3:
            process.suspend()

    with monkeypatch.context() as patch:
        struck(patch, third)
        began = time.monotonic()
        found = judged_in(workspace, config_of(llama, task_timeout_s=4.0, max_unjudged_frac=1.0))
        assert 4.0 <= time.monotonic() - began < 50
    late = [each for each in found if each.reward is None]
    assert 1 < len(late) < 16 and {each.unjudged for each in late} == {"time-out"} and gpu_programs.programs() == []
    batches = asked_of(monkeypatch)
    assert rewards_in(workspace, config_of(llama)) == undisturbed
    assert len(batches) == len(batches_of([len(row) for row in rows_of(llama, samples_of())], 256)) - 2
    scorer.close_all()
    monkeypatch.setattr(ScorerProgram, "__init__", lambda *inputs: pytest.fail("nothing is loaded when the time is over"))
    (workspace / "j").unlink()
    found = judged_in(workspace, config_of(llama, task_timeout_s=1e-9, max_unjudged_frac=1.0))
    assert {(each.reward, each.unjudged) for each in found} == {(None, "time-out")}


def test_a_model_that_was_replaced_under_its_path_scores_by_its_new_weights(workspace: Path, llama: Path) -> None:
    """On a CPU its program stays between the steps of a run."""
    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(llama, workspace / "model")
    (workspace / "a").mkdir()
    before = rewards_in(workspace / "a", config_of(folder))
    weights = load_file(folder / "model.safetensors")
    save_file({name: -each if name == "score.weight" else each for name, each in weights.items()}, folder / "model.safetensors")
    assert rewards_in(workspace, config_of(folder)) == [None if each is None else pytest.approx(-each) for each in before]


def test_a_score_is_of_the_program_that_gave_it_though_no_task_imports_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rewards.source_digests(config_of(llama))
    of_file = code_digest.digest_of_file
    code_digest.digest.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(code_digest, "digest_of_file", lambda path: "x" if path.stem == "program" else of_file(path))
        after = rewards.source_digests(config_of(llama))
    code_digest.digest.cache_clear()
    assert after != before


def test_a_program_that_is_lost_again_and_again_stops_the_step_with_one_line_and_the_log(
    workspace: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "MAX_LOST", 2)
    struck(monkeypatch, lambda process, rows: process.kill())
    with pytest.raises(RewardFailed, match=r"has ended.*, 2 times; the end of .*reward-model.log") as caught:
        judged_in(workspace, config_of(llama))
    assert classify(caught.value).name == "reward failed" and gpu_programs.programs() == []


def test_a_batch_that_needs_too_much_memory_is_halved_and_only_a_sample_that_alone_does_is_unjudged(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = made("llama", workspace / "wide", intermediate_size=65536)  # 256 KiB a token in each of three tensors
    samples = [replace(each, text=each.text * 4) for each in samples_of()]
    config = config_of(wide, max_unjudged_frac=1.0, max_tokens_per_batch=4096)
    undisturbed = rewards_in(workspace, config, samples)
    spare = 2**28

    def limited(process: psutil.Process, rows: Sequence[Sequence[int]]) -> None:
        process.rlimit(psutil.RLIMIT_DATA, (process.memory_info().data + spare, psutil.RLIM_INFINITY))

    struck(monkeypatch, limited)
    (workspace / "j").unlink()
    halved = rewards_in(workspace, config, samples)
    assert halved == pytest.approx(undisturbed, abs=1e-6) and halved != undisturbed, "other batches round otherwise"
    spare = 0
    (workspace / "j").unlink()
    found = judged_in(workspace, config, samples)
    assert {each.unjudged for each in found} == {"exception", ""}, "short ones find room"
    kept = [n for n, each in enumerate(found) if each.reward is not None]
    assert [found[n].reward for n in kept] == pytest.approx([undisturbed[n] for n in kept], abs=1e-6)
    assert len(gpu_programs.programs()) == 1, "the program lives"


def test_a_number_that_is_not_finite_and_a_conversation_that_is_too_long_are_unjudged_and_never_0(
    workspace: Path, llama: Path
) -> None:
    samples = samples_of()
    samples[3] = replace(samples[3], text="and " * 200)
    found = judged_in(workspace, config_of(llama, max_unjudged_frac=0.2), samples)
    assert [(n, each.unjudged) for n, each in enumerate(found) if each.reward is None] == [(3, "too long")]
    bad = made("llama", workspace / "bad")
    import safetensors.torch

    weights = safetensors.torch.load_file(bad / "model.safetensors")
    weights["score.weight"][:] = float("nan")
    safetensors.torch.save_file(weights, bad / "model.safetensors", {"format": "pt"})
    with pytest.raises(RewardFailed, match=r"could not judge 3 of 16 samples \(no number 3\).*its reward model gave nan"):
        judged_in(workspace, config_of(bad, max_unjudged_frac=0.1))


def test_scores_of_another_model_or_of_other_settings_are_not_used(
    workspace: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made("llama", workspace / "model")
    batches = asked_of(monkeypatch)
    first = rewards_in(workspace, config_of(folder))
    count = len(batches)
    assert rewards_in(workspace, config_of(folder)) == first and len(batches) == count, "all are in the journal"
    import safetensors.torch

    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["score.weight"] *= 2
    before = rewards.source_digests(config_of(folder))
    scorer.close_all()
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert rewards.source_digests(config_of(folder)) != before
    assert rewards_in(workspace, config_of(folder)) == pytest.approx([2 * (each or 0) for each in first])
    rewards_in(workspace, config_of(folder, max_tokens_per_batch=128))
    assert len(batches) > 2 * count
    count = len(batches)
    monkeypatch.setattr(program_versions, "of_trainer", lambda: {"torch": "1.0"})
    rewards_in(workspace, config_of(folder, max_tokens_per_batch=128))
    assert len(batches) > count, "scores of another version of torch are scored again"


def test_on_a_gpu_the_program_is_gone_when_the_samples_are_scored(
    workspace: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, seen = config_of(llama), list[int]()
    struck(monkeypatch, lambda process, rows: seen.append(process.pid))
    monkeypatch.setattr(scorer, "device_of", lambda model: "cuda")
    monkeypatch.setattr(scorer, "spec_of", lambda model: scorer.ModelSpec(str(llama), 0, "cpu", "float32", 1))
    with gpu_lock.gpu_lock("run"):
        judged_in(workspace, config)
        assert len({*seen}) == 1 and not psutil.pid_exists(seen[0]) and gpu_programs.programs() == []


def test_a_program_whose_owner_was_killed_is_ended_by_the_next_holder_of_the_gpus(workspace: Path, llama: Path) -> None:
    with gpu_lock.gpu_lock("run"):
        judged_in(workspace, config_of(llama))
        (note,) = gpu_programs.programs()
        assert (note.kind, note.role, note.is_expected) == ("reward_model", "reward_model", False)
        assert gpu_programs.running_without_state() is None, "it is no trainer"
    with gpu_lock.gpu_lock("next"):
        assert becomes(lambda: gpu_programs.programs() == [])


def test_an_evaluation_is_scored_when_the_engine_has_made_room_and_wakes_it_for_what_is_asked_next(
    workspace: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def noted(owner: type, name: str) -> None:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *inputs: (seen.append(name), method(self, *inputs))[1])

    noted(ScriptedEngine, "release_memory")
    noted(ScriptedEngine, "wake")
    noted(ScorerProgram, "ask")
    monkeypatch.setattr(scorer, "device_of", lambda model: "cuda")
    monkeypatch.setattr(scorer, "spec_of", lambda model: scorer.ModelSpec(str(llama), 0, "cpu", "float32", 1))
    config = RunConfig(
        name="mine",
        model=str(llama),
        engine=EngineConfig(kind="scripted"),
        reward=config_of(llama),
        evaluation=EvaluationConfig(num_prompts=4, num_samples=2, pass_at_k=(1, 2)),
    )
    made = evaluate_adapter.fn(config.engine, config.eval_config, config.data, adapter_at(config, 0))
    ScriptedEngine.stop_in(workspace)
    assert made.mean_reward and not made.is_binary
    assert [name for name, _ in groupby(seen)] == 2 * ["wake", "release_memory", "ask"], "greedy answers, then sampled ones"


def sampled_in(workspace: Path, config: RewardConfig, llama: Path, during: Callable[[], object]) -> None:
    """A rollout whose scoring is not reached."""
    path = write_json_lines(workspace / "runs/r/steps/000000/prompts.jsonl", [each._asdict() for each in PROMPTS])
    batch = PromptBatch(run="r", step=0, file=record_of(path), num_prompts=4, dataset_fingerprint="f", first_row=0)
    adapter = untrained_adapter(llama)
    with scored_ahead(RunConfig(name="r", reward=config), batch, adapter):
        during()


def test_its_program_reads_the_model_beside_the_rollout_and_takes_no_memory_of_its_device_before_it_is_needed(
    workspace: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(llama)

    def scoring_after_a_rollout() -> None:
        (program,) = scorer._OPEN.values()
        process = psutil.Process(program._process.pid)
        assert becomes(lambda: process.memory_info().rss > 200 * 2**20, 60), "torch is loaded"
        assert becomes(lambda: _is_idle(process), 60)
        assert not select.select([program._results], [], [], 0)[0], "it waits for the word that there is room"
        rewards_in(workspace, config)
        assert scorer.opened(config) is program, "no other one was started"

    sampled_in(workspace, config, llama, scoring_after_a_rollout)


def _is_idle(process: psutil.Process) -> bool:
    before = sum(process.cpu_times()[:2])
    time.sleep(0.3)
    return sum(process.cpu_times()[:2]) == before


@pytest.mark.full
def test_a_program_that_was_started_beside_the_rollout_in_vain_leaves_a_gpu_and_a_lost_one_is_started_again(
    workspace: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(llama)
    monkeypatch.setattr(scorer, "device_of", lambda model: "cuda")
    monkeypatch.setattr(scorer, "spec_of", lambda model: scorer.ModelSpec(str(llama), 0, "cpu", "float32", 1))
    sampled_in(workspace, config, llama, lambda: len(gpu_programs.programs()) == 1 or pytest.fail("it was not started"))
    assert gpu_programs.programs() == []

    def lost() -> None:
        (program,) = scorer._OPEN.values()
        psutil.Process(program._process.pid).kill()
        assert all(each is not None for each in rewards_in(workspace, config))

    sampled_in(workspace, config, llama, lost)
    assert gpu_programs.programs() == []


def test_it_is_one_reward_among_several(workspace: Path, llama: Path) -> None:
    alone = rewards_in(workspace, config_of(llama))
    (workspace / "b").mkdir()
    functions = [{"name": "reward_model", "weight": 2.0}, {"name": "gsm8k_numeric", "weight": 0.0}]
    found = judged_in(workspace / "b", config_of(llama, functions=functions))
    assert [each.reward for each in found] == pytest.approx([2 * (each or 0) for each in alone])
    assert found[0].reward_parts and set(found[0].reward_parts) == {"reward_model", "gsm8k_numeric"}


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "no path": ({"path": ""}, "reward 'reward_model' needs reward.model.path"),
    "batches too small": ({"max_tokens": 512}, "reward.model.max_tokens 512 is above max_tokens_per_batch 256"),
    "engine as judge beside": (
        {"functions": [{"name": "reward_model"}, {"name": "rubric"}]},
        "reward_model and a judge with reward.judge.by 'engine'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_configuration_that_cannot_work_is_refused(llama: Path, case: str) -> None:
    fields, message = REFUSED[case]
    judge = {"judge": {"by": "engine", "rubric": "{completion}"}}
    with pytest.raises(ValidationError) as caught:
        RewardConfig.model_validate({**config_of(llama).model_dump(), **judge, **_nested(fields, llama)})
    assert message in one_line(caught.value)


def _nested(fields: dict[str, object], folder: Path) -> dict[str, object]:
    model = {"path": str(folder), "max_tokens": 128, "max_tokens_per_batch": 256}
    return {"functions": fields["functions"]} if "functions" in fields else {"model": model | fields}


def _changed(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda folder: folder.rename(folder.with_name("away")), r"reward.model.path: model '.*' is no folder"),
    "no model": (lambda folder: (folder / "config.json").unlink(), "has no config.json, so it holds no model"),
    "a language model": (
        lambda folder: _changed(folder, architectures=["LlamaForCausalLM"]),
        "holds LlamaForCausalLM: a reward model is one whose architecture ends in ForSequenceClassification",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no \\*.safetensors"),
    "few positions": (lambda folder: _changed(folder, max_position_embeddings=64), "128 is more than the 64 positions"),
    "no template": (lambda folder: (folder / "chat_template.jinja").unlink(), "has no chat template"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_folder_that_cannot_score_is_refused_before_anything_starts(workspace: Path, case: str) -> None:
    folder, (spoil, message) = made("llama", workspace / "model"), UNUSABLE[case]
    rewards.check(config_of(folder))
    by_reward_model.checks._located.cache_clear()
    base_model.tokenizer.cache_clear()
    spoil(folder)
    with pytest.raises(ValueError, match=message) as caught:
        rewards.check(config_of(folder))
    assert "\n" not in str(caught.value)


def test_a_model_without_a_trained_head_or_with_too_few_outputs_is_refused_when_it_is_loaded(workspace: Path) -> None:
    import safetensors.torch

    folder = made("llama", workspace / "model")
    with pytest.raises(RewardFailed, match=r"cannot be loaded: it has 1 outputs, and reward.model.label is 1"):
        judged_in(workspace, config_of(folder, label=1))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    del weights["score.weight"]
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RewardFailed, match=r"its files have no score.weight, which would be random"):
        judged_in(workspace, config_of(folder))
    assert gpu_programs.programs() == []


def test_batches_hold_as_many_tokens_as_they_may_padding_included() -> None:
    lengths = [3, 9, 4, 4, 1, 8, 30]
    found = batches_of(lengths, 20)
    assert found == [[6], [1, 5], [2, 3, 0, 4]]
    assert all(len(batch) == 1 or len(batch) * max(lengths[n] for n in batch) <= 20 for batch in found)
    assert batches_of([], 20) == []


def test_figures_of_runs_without_a_reward_model_keep_their_digest(llama: Path) -> None:
    def digest(reward: RewardConfig) -> str:
        (found,) = RunConfig(name="r", reward=reward).eval_configs.values()
        return eval_digest(found)

    plain, with_model = RewardConfig(), RewardConfig().but(model=config_of(llama).model)
    assert digest(plain) == digest(with_model), "the section is not used"
    used = {digest(config_of(llama, max_tokens=n)) for n in (64, 128)}
    assert len(used) == 2 and digest(config_of(llama, load_timeout_s=5.0)) in used
