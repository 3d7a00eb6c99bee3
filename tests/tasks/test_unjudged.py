"""What could not be judged is a value of its own: null with a reason, never 0, in no mean, no advantage and no loss; and a scoring that
breaks off goes on at the missing samples."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from shared import is_gone, sample

from infra.config import BatchConfig, EvaluationConfig, RewardConfig
from infra.data.prompts import Prompt
from infra.eval_records import Evaluation
from infra.failures import RewardFailed, classify
from infra.records import File
from infra.rewards import client
from infra.runs import evaluations
from infra.runs.eval_figures import mean_pass_at_k
from infra.settings import CHECKOUT
from infra.store.samples import Sample, read_samples, write_samples
from tasks.assemble import judged_only, with_advantages, with_overlong_penalty
from tasks.evaluations.evaluate_adapter import digest_of
from tasks.rewards.apply import judged
from tasks.score import num_trainable_groups, shuffled

LOGS = """import os, time
HERE = os.path.dirname(os.path.abspath(__file__))
def note(completion):
    with open(HERE + "/calls", "a") as file: file.write(completion + "\\n")
def seen(completion):
    with open(HERE + "/calls") as file: return file.read().split().count(completion)
"""
PROMPTS = [Prompt(n, n, f"{n}?", "#### 4", [1], 0) for n in range(8)]
INPUTS = {"samples": "s", "prompts": "p"}


@pytest.fixture(autouse=True)
def _ends_pools(workspace: Path) -> Iterator[None]:
    yield
    client.close_all()


def samples_of(num_prompts: int = 8, size: int = 4) -> list[Sample]:
    return [
        replace(sample(prompt_id=p), prompt_id=p, sample_index=i, text=f"{p}-{i}")
        for p in range(num_prompts)
        for i in range(size)
    ]


def reward_in(folder: Path, body: str, **fields: float) -> RewardConfig:
    (folder / "mine.py").write_text(
        f"{LOGS}def score(*, completion):\n    note(completion)\n    {body}\n    return float(completion[-1])\n"
    )
    (folder / "calls").write_text("")
    return RewardConfig.model_validate({"name": f"{folder}/mine.py:score", "workers": 2, **fields})


def calls_in(folder: Path) -> list[str]:
    return (folder / "calls").read_text().split()


def test_unjudged_samples_are_null_with_a_reason_in_the_file_and_the_others_are_as_without_them(tmp_path: Path) -> None:
    config = reward_in(tmp_path, "if completion == '3-2': raise KeyError(completion)", max_unjudged_frac=0.05)
    samples = samples_of()
    found = judged(config, samples, PROMPTS, tmp_path / "j", INPUTS)
    assert [(each.text, each.reward, each.unjudged) for each in found if each.reward is None] == [("3-2", None, "exception")]
    assert [each.reward for each in found if each.text != "3-2"] == [
        float(each.text[-1]) for each in samples if each.text != "3-2"
    ]
    back = read_samples(write_samples(tmp_path / "scored.parquet", found))
    assert back == found and back[14].unjudged == "exception" and back[14].reward is None
    whole = [replace(each, reward=1.0, unjudged="") for each in found]
    assert (
        write_samples(tmp_path / "a.parquet", whole).read_bytes()
        == write_samples(tmp_path / "b.parquet", read_samples(tmp_path / "a.parquet")).read_bytes()
    )


def test_above_the_share_the_step_stops_with_three_cases_and_then_judges_only_what_is_missing(tmp_path: Path) -> None:
    body = "if int(completion[0]) > 4 and not os.path.exists(HERE + '/fixed'): raise RuntimeError('judge away')"
    config = reward_in(tmp_path, body, max_unjudged_frac=0.1)
    with pytest.raises(RewardFailed) as caught:
        judged(config, samples_of(), PROMPTS, tmp_path / "j", INPUTS)
    said = str(caught.value)
    assert "\n" not in said and said.count("raised RuntimeError: judge away at ") == 3
    assert f"at {tmp_path}/mine.py:9, for question '5?', completion '5-" in said
    assert "reward.max_unjudged_frac is 0.1" in said and classify(caught.value).name == "reward failed"
    (tmp_path / "calls").write_text("")
    (tmp_path / "fixed").touch()
    found = judged(config, samples_of(), PROMPTS, tmp_path / "j", INPUTS)
    assert [each.reward for each in found] == [float(each.text[-1]) for each in samples_of()]
    calls = calls_in(tmp_path)
    assert len(calls) == len(set(calls)) < 32 and {text for text in calls if int(text[0]) > 4} == {
        f"{p}-{i}" for p in (5, 6, 7) for i in range(4)
    }


def test_at_the_deadline_of_the_scoring_the_step_stops_and_then_judges_only_what_is_missing(tmp_path: Path) -> None:
    body = "time.sleep(600 if completion[0] == '7' and not os.path.exists(HERE + '/fixed') else 0)"
    config = reward_in(tmp_path, body, max_unjudged_frac=0.0, workers=1, task_timeout_s=3.0)
    with pytest.raises(RewardFailed, match=f"reward.task_timeout_s was over at {tmp_path}/mine.py:9, for question '7\\?'"):
        judged(config, samples_of(), PROMPTS, tmp_path / "j", INPUTS)
    (tmp_path / "calls").write_text("")
    (tmp_path / "fixed").touch()
    found = judged(config, samples_of(), PROMPTS, tmp_path / "j", INPUTS)
    assert [each.reward for each in found] == [float(each.text[-1]) for each in samples_of()]
    assert {text[0] for text in calls_in(tmp_path)} == {"7"}


def test_scores_of_another_source_or_of_other_samples_are_not_used(tmp_path: Path) -> None:
    config = reward_in(tmp_path, "pass")
    judged(config, samples_of(), PROMPTS, tmp_path / "j", INPUTS)
    judged(config, samples_of(), PROMPTS, tmp_path / "j", INPUTS)
    assert len(calls_in(tmp_path)) == 32, "all are in the journal"
    judged(config, samples_of(), PROMPTS, tmp_path / "j", INPUTS | {"prompts": "other"})
    assert len(calls_in(tmp_path)) == 64


@pytest.mark.parametrize(
    "body", ["if seen(completion) == 1: os.kill(os.getpid(), 9)", "if seen(completion) == 1: time.sleep(60)"]
)
def test_a_worker_that_is_killed_or_hangs_once_changes_no_score(tmp_path: Path, body: str) -> None:
    config = reward_in(tmp_path, f"if completion in ('1-1', '6-0'):\n        {body}", timeout_s=3.0, max_unjudged_frac=0.0)
    found = judged(config, samples_of(), PROMPTS, tmp_path / "j", INPUTS)
    assert [each.reward for each in found] == [float(each.text[-1]) for each in samples_of()]


PROGRAM = """
import sys
sys.path[:0] = sys.argv[2:]
from test_unjudged import *
judged(RewardConfig(name=sys.argv[1] + "/mine.py:score", workers=2), samples_of(), PROMPTS, Path(sys.argv[1]) / "j", INPUTS)
"""


def test_a_flow_that_is_killed_in_scoring_takes_its_workers_with_it_and_goes_on_without_judging_twice(tmp_path: Path) -> None:
    config = reward_in(tmp_path, "time.sleep(0.1)")
    paths = [str(CHECKOUT / "tests/tasks"), str(CHECKOUT / "tests"), str(CHECKOUT)]
    flow = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path), *paths], start_new_session=True)
    while len(calls_in(tmp_path)) < 8:
        time.sleep(0.01)
        assert flow.poll() is None
    programs = psutil.Process(flow.pid).children(recursive=True)
    assert len(programs) == 3, "a pool and two workers"
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    psutil.wait_procs(programs, timeout=10)
    assert all(is_gone(each.pid) for each in programs)
    before = calls_in(tmp_path)
    found = judged(config, samples_of(), PROMPTS, tmp_path / "j", INPUTS)
    assert [each.reward for each in found] == [float(each.text[-1]) for each in samples_of()]
    twice = {text for text in calls_in(tmp_path) if calls_in(tmp_path).count(text) > 1}
    assert len(before) >= 8 and len(twice) <= 4, "but for those that were under way, or judged and not yet in the journal"


def scored(*groups: list[float | None]) -> list[Sample]:
    return [
        replace(
            sample(prompt_id=p), prompt_id=p, sample_index=i, reward=reward, unjudged="" if reward is not None else "time-out"
        )
        for p, group in enumerate(groups)
        for i, reward in enumerate(group)
    ]


def test_an_unjudged_sample_is_in_no_baseline_and_a_group_with_one_judged_sample_teaches_nothing() -> None:
    samples = scored([1.0, None, 0.0, 1.0], [None, None, None, 1.0], [0.0, 0.0, None, None])
    assert num_trainable_groups(samples) == 1
    kept = judged_only(samples)
    assert [(each.prompt_id, each.reward) for each in kept] == [(0, 1.0), (0, 0.0), (0, 1.0), (2, 0.0), (2, 0.0)]
    for kind in ("grpo", "dr_grpo", "rloo"):
        config = BatchConfig.model_validate({"advantage": kind})
        alone = with_advantages(scored([1.0, 0.0, 1.0]), config)
        assert [each.advantage for each in with_advantages(kept, config)][:3] == [each.advantage for each in alone]
    config = BatchConfig.model_validate({"overlong": {"buffer_tokens": 1, "max_output_tokens": 2, "penalty": 1.0}})
    assert [each.reward is None for each in with_overlong_penalty(samples, config.overlong)] == [
        s.reward is None for s in samples
    ]
    assert {each.unjudged == "" for each in shuffled(samples, 1, 0) if each.reward is not None} == {True}


def test_an_evaluation_leaves_unjudged_answers_out_of_n() -> None:
    samples = scored([1.0, 0.0, None], [None, None, None], [1.0, None, None])
    assert mean_pass_at_k(samples, 1, 1.0) == pytest.approx((0.5 + 1.0) / 2)
    assert mean_pass_at_k(samples, 2, 1.0) == 1.0, "the third question has one judged answer: it is left out"
    assert mean_pass_at_k(samples, 3, 1.0) is None


def evaluation(step: int, passed: float, *, is_eligible: bool) -> Evaluation:
    return Evaluation(
        run="r",
        step=step,
        adapter_sha256="",
        eval_digest="",
        file=File(path="x", sha256="", num_bytes=0),
        num_prompts=4,
        num_overlapping=0,
        pass_at_1=passed,
        pass_at_k={},
        truncated_frac=0.0,
        mean_reward=passed,
        max_reward=1.0,
        is_binary=True,
        is_eligible=is_eligible,
    )


def test_an_evaluation_with_too_many_unjudged_answers_is_neither_the_best_nor_counted_for_patience() -> None:
    config = EvaluationConfig(patience=1)
    found = [evaluation(0, 0.5, is_eligible=True), evaluation(5, 0.9, is_eligible=False)]
    best = evaluations.best_of(config, found)
    assert best and best.step == 0
    assert not evaluations.has_stalled(config, found)
    assert evaluations.has_stalled(config, [*found, evaluation(10, 0.5, is_eligible=True)])
    assert evaluations.best_of(config, found[1:]) is None


def test_several_rewards_are_summed_by_weight_and_each_is_a_part(tmp_path: Path) -> None:
    code = (
        "def right(*, completion, answer): return float(completion == '2-1')\ndef short(*, completion): return {'a': 1, 'b': 3}\n"
    )
    (tmp_path / "mine.py").write_text(code + "def odd(*, completion): return None if completion == '1-1' else 1.0\n")
    functions = [
        {"name": f"{tmp_path}/mine.py:right"},
        {"name": f"{tmp_path}/mine.py:short", "weight": 0.5, "weights": {"b": 0.5}},
        {"name": f"{tmp_path}/mine.py:odd", "weight": -1},
        {"name": "gsm8k_numeric"},
    ]
    config = RewardConfig.model_validate({"functions": functions, "workers": 1})
    found = {each.text: each for each in judged(config, samples_of(4, 8), PROMPTS, tmp_path / "j", INPUTS)}
    assert (found["2-1"].reward, found["0-0"].reward) == (1.25, 0.25)
    assert found["2-1"].reward_parts == {
        "right": 1.0,
        "short": 2.5,
        "short.a": 1.0,
        "short.b": 3.0,
        "odd": 1.0,
        "gsm8k_numeric": 0.0,
    }
    assert (found["1-1"].reward, found["1-1"].unjudged) == (None, "odd returned None")
    with pytest.raises(ValueError, match="has two functions of the name 'short'"):
        RewardConfig.model_validate({"functions": [{"name": "a.py:short"}, {"name": "b.py:short"}]})


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("{'right': 1, 'short': 1}", "returned the parts right, short, and reward.functions has a weight of the part 'shrot'"),
        (
            "{'reward': 1, 'shrot': 1}",
            "returned a whole reward, and reward.functions has weights of its parts shrot: leave one out",
        ),
        ("1.0", "returned a whole reward, and reward.functions has weights of its parts shrot: leave one out"),
    ],
)
def test_a_weight_without_its_part_is_refused(tmp_path: Path, returned: str, said: str) -> None:
    """It would have no effect, and the part that it was meant for a weight of 1."""
    (tmp_path / "mine.py").write_text(f"def score(*, completion): return {returned}\n")
    for name in (f"{tmp_path}/mine.py:score", "gsm8k_numeric"):
        config = RewardConfig.model_validate({"functions": [{"name": name, "weights": {"shrot": 0.2}}], "workers": 1})
        with pytest.raises(RewardFailed, match=re.escape(said if name != "gsm8k_numeric" else "returned a whole reward")):
            judged(config, samples_of(2, 2), PROMPTS, tmp_path / "j", INPUTS)


def test_other_answers_have_another_digest_so_that_no_score_is_given_to_an_answer_that_it_is_not_of() -> None:
    answers = samples_of(2, 2)
    digests = {
        digest_of(found)
        for found in (
            answers,
            [replace(answers[0], text="other"), *answers[1:]],
            [replace(answers[0], output_tokens=[7]), *answers[1:]],
            [replace(answers[0], finish_reason="length"), *answers[1:]],
        )
    }
    assert len(digests) == 4 and digest_of(answers) == digest_of(samples_of(2, 2))
