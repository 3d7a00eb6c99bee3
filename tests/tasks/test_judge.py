"""A model that judges: faults of its endpoint cost the samples that they strike, nothing that was paid is paid again, and its key is nowhere."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from judge_server import Reply, judge_server
from pydantic import ValidationError
from shared import becomes, sample

from infra.config import RewardConfig, RunConfig
from infra.config.tools.overrides import one_line
from infra.data.prompts import Prompt
from infra.failures import RewardFailed, classify
from infra.records import PromptBatch, Rollouts
from infra.reporting.sample_text import samples_section
from infra.reporting.shown_samples import answers_of_judge
from infra.rewards.judges.ledger import Ledger
from infra.rewards.outcome import ALONE, JUDGE_UNAVAILABLE, JUDGE_UNREADABLE, TIME_OUT
from infra.runs.evaluations import eval_digest
from infra.settings import CHECKOUT, settings
from infra.store.files import record_of, write_json_lines
from infra.store.layout import StepFolder, run_folder
from infra.store.samples import Sample, write_samples
from infra.telemetry.timings import measures_of
from tasks import rewards
from tasks.commit_step import metrics_of
from tasks.rewards import by_model
from tasks.rewards.apply import judged
from tasks.rewards.by_model import JudgedWork, figures_of
from tasks.score import score
from tasks.support.preflight import open_run

KEY = "sk-hunter2"
PROMPTS = [Prompt(n, n, f"{n}+1?", str(n + 1), [1], 0, {"level": n, "tags": ["a", "b"]}) for n in range(3)]
RUBRIC = "Question {question} truth {answer} level {row[level]} given <{completion}>. JSON is {{...}}."


def samples_of(num_prompts: int = 3, size: int = 4) -> list[Sample]:
    return [
        replace(sample(prompt_id=p), prompt_id=p, sample_index=i, text=f"{p}-{i}")
        for p in range(num_prompts)
        for i in range(size)
    ]


def config_of(url: str, name: str = "rubric", **fields: object) -> RewardConfig:
    judge = {"base_url": url, "model": "judge-1", "retry_delay_s": 0.01, "timeout_s": 60.0} | (
        {"rubric": RUBRIC} if name == "rubric" else {}
    )
    whole = {name: fields.pop(name) for name in ("max_unjudged_frac",) if name in fields}
    return RewardConfig.model_validate({"name": name, "max_unjudged_frac": 0.5, "judge": judge | fields, **whole})


def work_in(folder: Path, name: str = "step 0") -> JudgedWork:
    return JudgedWork("r", name, folder / "judgements.jsonl")


def judged_in(
    folder: Path, config: RewardConfig, samples: list[Sample] | None = None, name: str = "step 0", **how: bool
) -> list[Sample]:
    return judged(config, samples or samples_of(), PROMPTS, folder / "j", {}, work=work_in(folder, name), **how)


def score_of_text(body: dict[str, Any], number: int) -> Reply:
    """The sample's index, divided by ten."""
    completion = body["messages"][-1]["content"].partition("<")[2].partition(">")[0]
    return Reply(text=json.dumps({"reasoning": "because", "score": int(completion[-1]) / 10}))


def bad_for(text: str, *replies: Reply) -> Callable[[dict[str, Any], int], Reply]:
    """The replies to the sample with this text, one after the other, the last one again and again; the others are judged."""
    seen = Counter[str]()

    def answer(body: dict[str, Any], number: int) -> Reply:
        if f"<{text}>" not in body["messages"][-1]["content"]:
            return score_of_text(body, number)
        seen[text] += 1
        return replies[min(seen[text], len(replies)) - 1]._replace(
            **({} if replies[min(seen[text], len(replies)) - 1] != GOOD else {"text": score_of_text(body, 0).text})
        )

    return answer


GOOD = Reply(text="good")


def test_each_sample_is_judged_by_the_filled_rubric_and_the_answers_are_kept(workspace: Path) -> None:
    with judge_server(score_of_text) as server:
        found = judged_in(workspace, config_of(server.url))
    assert [each.reward for each in found] == [each.sample_index / 10 for each in found]
    asked = [prompt for prompt in server.prompts if "<2-3>" in prompt]
    assert len(asked) == 1 and asked[0].startswith(
        "Question 2+1? truth 3 level 2 given <2-3>. JSON is {...}.\n\nAnswer with one JSON object"
    )
    assert asked[0].endswith("N is a number from 0 to 1.")
    assert server.bodies[0]["response_format"]["json_schema"]["schema"]["required"] == ["reasoning", "score"]
    rows = [json.loads(line) for line in (workspace / "judgements.jsonl").read_text().splitlines()]
    assert [(row["prompt_id"], row["sample_indices"]) for row in rows][:5] == [(0, [0]), (0, [1]), (0, [2]), (0, [3]), (1, [0])]
    assert json.loads(rows[3]["votes"][0]["text"]) == {"reasoning": "because", "score": 0.3} and rows[3]["votes"][0][
        "scores"
    ] == [0.3]


FAULTS: dict[str, tuple[tuple[Reply, ...], str, str, int]] = {
    "429 twice": ((Reply(429, "slow down"), Reply(429, "slow down"), GOOD), "", "", 3),
    "429 with Retry-After": ((Reply(429, "slow down", {"Retry-After": "0.2"}), GOOD), "", "", 2),
    "429 for ever": ((Reply(429, "slow down"),), JUDGE_UNAVAILABLE, "HTTP 429 slow down; 3 attempts", 3),
    "429, Retry-After of an hour": ((Reply(429, "", {"Retry-After": "3600"}),), JUDGE_UNAVAILABLE, "HTTP 429 ; 1 attempt", 1),
    "429, the quota is spent": ((Reply(429, '{"code": "insufficient_quota"}'),), JUDGE_UNAVAILABLE, "insufficient_quota", 1),
    "500 once": ((Reply(500, "oops"), GOOD), "", "", 2),
    "503 for ever": ((Reply(503, "busy"),), JUDGE_UNAVAILABLE, "HTTP 503 busy; 3 attempts", 3),
    "400": ((Reply(400, "too long"),), JUDGE_UNAVAILABLE, "HTTP 400 too long; 1 attempt", 1),
    "401": ((Reply(401, f"bad key {KEY}"),), JUDGE_UNAVAILABLE, "HTTP 401 bad key ***; 1 attempt", 1),
    "404": ((Reply(404, "no such model"),), JUDGE_UNAVAILABLE, "HTTP 404 no such model; 1 attempt", 1),
    "307 to elsewhere": ((Reply(307, "", {"Location": "http://127.0.0.1:1/v1"}),), JUDGE_UNAVAILABLE, "HTTP 307", 1),
    "slow once": ((Reply(delay_s=5.0), GOOD), "", "", 2),
    "slow for ever": ((Reply(delay_s=5.0),), JUDGE_UNAVAILABLE, "gave no answer in 2 s; 3 attempts", 3),
    "cut off in the middle of the body": ((Reply(is_cut=True), GOOD), "", "", 2),
    "garbage": ((Reply(raw=b"\x00\xffgarbage"),), JUDGE_UNREADABLE, "no chat completion", 1),
    "HTML": ((Reply(raw=b"<html>login</html>"),), JUDGE_UNREADABLE, "no chat completion: '<html>login</html>'", 1),
    "a score in no chat completion": ((Reply(raw=b'{"score": 1}'),), JUDGE_UNREADABLE, "no chat completion", 1),
    "no choices": ((Reply(raw=b'{"choices": []}'),), JUDGE_UNREADABLE, "no chat completion", 1),
    "half JSON in the answer": ((Reply(text='{"reasoning": "a", "sco'),), JUDGE_UNREADABLE, "it is no JSON", 1),
    "no answer": ((Reply(text=""),), JUDGE_UNREADABLE, "it is no JSON: ''", 1),
    "prose": ((Reply(text="I give it 7."),), JUDGE_UNREADABLE, "it is no JSON", 1),
    "a list": ((Reply(text="[1]"),), JUDGE_UNREADABLE, "it is no JSON object", 1),
    "no score": ((Reply(text='{"reasoning": "x"}'),), JUDGE_UNREADABLE, "its score is 'None'", 1),
    "a score that is text": ((Reply(text='{"score": "high"}'),), JUDGE_UNREADABLE, "its score is 'high'", 1),
    "a score that is true": ((Reply(text='{"score": true}'),), JUDGE_UNREADABLE, "its score is 'True'", 1),
    "a score that is NaN": ((Reply(text='{"score": NaN}'),), JUDGE_UNREADABLE, "its score is 'nan'", 1),
    "a score out of the range": ((Reply(text='{"score": 7}'),), JUDGE_UNREADABLE, "its score 7 is not from 0 to 1", 1),
    "two JSON blocks": ((Reply(text='```json\n{"score": 1}\n```\n```json\n{"score": 0}\n```'),), JUDGE_UNREADABLE, "no JSON", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_its_own_sample_and_no_other(workspace: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replies, reason, message, num_asked = FAULTS[fault]
    monkeypatch.setenv("RATCHET_JUDGE_API_KEY", KEY)
    settings.cache_clear()
    with judge_server(bad_for("1-2", *replies)) as server:
        found = judged_in(workspace, config_of(server.url, max_attempts=3, timeout_s=2.0 if "slow" in fault else 60.0))
    assert [each.reward for each in found if each.text != "1-2"] == [
        each.sample_index / 10 for each in found if each.text != "1-2"
    ]
    bad = next(each for each in found if each.text == "1-2")
    assert (bad.reward, bad.unjudged) == ((0.2, "") if not reason else (None, reason))
    assert sum("<1-2>" in prompt for prompt in server.prompts) == num_asked
    rows = [json.loads(line) for line in (workspace / "judgements.jsonl").read_text().splitlines()]
    assert message in rows[6]["votes"][0]["message"]


def test_a_judge_that_is_not_there_stops_the_step_and_the_same_command_asks_only_what_is_missing(workspace: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RewardFailed, match="judge unavailable") as caught:
        judged_in(workspace, config_of(f"http://127.0.0.1:{port}/v1", max_unjudged_frac=0.1, max_attempts=2))
    assert (
        "Cannot connect" in str(caught.value) and "\n" not in str(caught.value) and classify(caught.value).name == "reward failed"
    )
    with judge_server(lambda body, n: Reply(503) if n > 5 else score_of_text(body, n)) as server:
        with pytest.raises(RewardFailed):
            judged_in(workspace, config_of(server.url, max_unjudged_frac=0.1, max_attempts=1, concurrency=1))
        server.answer, asked = score_of_text, server.prompts[:5]
        found = judged_in(workspace, config_of(server.url, max_unjudged_frac=0.1))
    assert [each.reward for each in found] == [each.sample_index / 10 for each in found]
    assert all(server.prompts.count(prompt) == 1 for prompt in asked), "what was paid is not paid again"


def test_nothing_is_paid_twice_by_another_scoring_an_evaluation_or_another_run(workspace: Path) -> None:
    with judge_server(score_of_text) as server:
        config = config_of(server.url, input_price=1.0, output_price=10.0)
        first = judged_in(workspace, config)
        again = judged_in(workspace, config, name="evaluation 1", stops=False)
        other = judged(
            config, samples_of(), PROMPTS, workspace / "j", {}, work=JudgedWork("other", "step 0", workspace / "o.jsonl")
        )
        assert first == again == other and len(server.bodies) == 12
        judged_in(workspace, config_of(server.url, model="judge-2"))
        judged_in(workspace, config_of(server.url, rubric="{completion}! <{completion}>"))
        assert len(server.bodies) == 36, "another model and another rubric are other judgements"
    assert figures_of(config.judge, work_in(workspace)) == {
        "judge_requests": 36.0,
        "judge_input_tokens": 3600.0,
        "judge_output_tokens": 360.0,
        "judge_run_tokens": 3960.0,
        "judge_cost": pytest.approx(0.0072),
        "judge_run_cost": pytest.approx(0.0072),
    }
    assert figures_of(config.judge, work_in(workspace, "evaluation 1"))["judge_requests"] == 0


def test_equal_samples_are_asked_of_once(workspace: Path) -> None:
    with judge_server(score_of_text) as server:
        same = [replace(each, text="7-1") for each in samples_of(1)]
        assert [each.reward for each in judged_in(workspace, config_of(server.url), same)] == [0.1] * 4
    assert len(server.bodies) == 1


PROGRAM = """
import sys
sys.path[:0] = sys.argv[3:]
from test_judge import *
judged_in(Path(sys.argv[1]), config_of(sys.argv[2], concurrency=2))
"""


def test_a_flow_that_is_killed_while_its_judge_answers_goes_on_without_paying_again(workspace: Path) -> None:
    with judge_server(lambda body, n: score_of_text(body, n)._replace(delay_s=0.1)) as server:
        paths = [str(CHECKOUT / "tests/tasks"), str(CHECKOUT / "tests"), str(CHECKOUT)]
        flow = subprocess.Popen([sys.executable, "-c", PROGRAM, str(workspace), server.url, *paths])
        assert becomes(lambda: len(server.bodies) >= 7, 60) and flow.poll() is None
        os.kill(flow.pid, signal.SIGKILL)
        flow.wait()
        with Ledger() as ledger:
            num_paid = ledger.spent("r").requests
        found = judged_in(workspace, config_of(server.url))
    assert [each.reward for each in found] == [each.sample_index / 10 for each in found]
    twice = [prompt for prompt, count in Counter(server.prompts).items() if count > 1]
    assert num_paid >= 4 and len(twice) <= 2, "but for the two that were under way"


def test_a_step_that_stops_awaits_the_answers_that_are_under_way(workspace: Path) -> None:
    def answer(body: dict[str, Any], number: int) -> Reply:
        return Reply(404) if number <= 3 else score_of_text(body, number)._replace(delay_s=0.3)

    with judge_server(answer) as server, pytest.raises(RewardFailed):
        judged_in(workspace, config_of(server.url, max_unjudged_frac=0.0, concurrency=8))
    with Ledger() as ledger:
        assert ledger.spent("r").requests == len(server.bodies) - 3 > 0


def test_at_the_deadline_of_the_scoring_nothing_more_is_sent_and_what_is_under_way_is_kept(workspace: Path) -> None:
    delay_s = 1.0

    def slow(body: dict[str, Any], number: int) -> Reply:
        return score_of_text(body, number)._replace(delay_s=delay_s)

    with judge_server(slow) as server:
        config = config_of(server.url, concurrency=2, max_unjudged_frac=1.0)
        assert all(each.reward is None for each in judged_in(workspace, config.but(task_timeout_s=1e-6))) and not server.bodies
        found = judged_in(workspace, config.but(task_timeout_s=2.5))
        num_sent = len(server.bodies)
        missing = [each for each in found if each.reward is None]
        assert 2 <= num_sent == len(found) - len(missing) < len(found)
        assert {each.unjudged for each in missing} == {TIME_OUT}
        delay_s = 0.0
        again = judged_in(workspace, config)
        assert [each.reward for each in again] == [each.sample_index / 10 for each in again]
        assert len(server.bodies) == len(found), "what was answered is not sent again"


def test_a_budget_stops_the_run_before_more_is_asked_and_a_higher_one_goes_on(workspace: Path) -> None:
    for limit in ({"max_run_tokens": 500}, {"max_run_cost": 0.0004, "input_price": 1.0, "output_price": 1.0}):
        with judge_server(score_of_text) as server:
            fields = {"concurrency": 1, "model": next(iter(limit)), **limit}
            with pytest.raises(RewardFailed, match=f"reward.judge.{next(iter(limit))} is .*: raise it") as caught:
                judged_in(workspace, config_of(server.url, **fields), name=next(iter(limit)))
            assert "\n" not in str(caught.value)
            num_asked = len(server.bodies)
            found = judged_in(workspace, config_of(server.url, concurrency=1, model=next(iter(limit))))
            assert num_asked <= 5 and len(server.bodies) == 12 and all(each.reward is not None for each in found)


def test_a_run_does_not_pay_for_an_earlier_one_of_its_name(workspace: Path, model_folder: Path) -> None:
    """Its budget was spent before its first step, and its figures and its copy had what the other one has paid."""
    with judge_server(score_of_text) as server:
        reward = config_of(server.url)
        config = RunConfig(name="r", model=str(model_folder), reward=reward)
        open_run(config)
        judged_in(workspace, reward)
        with Ledger() as ledger:
            paid = ledger.spent("r")
        open_run(config)  # it goes on
        assert figures_of(reward.judge, work_in(workspace))["judge_run_tokens"] == paid.tokens > 0
        shutil.rmtree(run_folder("r"))
        open_run(config)
        assert figures_of(reward.judge, work_in(workspace))["judge_run_tokens"] == 0
        by_model.keep_paid(workspace / "paid.jsonl", "r", "step 0")
        assert not (workspace / "paid.jsonl").exists()
        num_asked = len(server.bodies)
        assert judged_in(workspace, reward) and len(server.bodies) == num_asked, "its answers are still known"


def test_votes_are_combined_and_more_than_half_must_be_readable(workspace: Path) -> None:
    given = {"0-0": ["0.1", "0.2", "0.9"], "0-1": ["0.4", "x", "0.6"], "0-2": ["x", "0.5", "x"], "0-3": ["1", "1", "1"]}
    left = {text: list(votes) for text, votes in given.items()}

    def answer(body: dict[str, Any], number: int) -> Reply:
        text = body["messages"][-1]["content"].partition("<")[2].partition(">")[0]
        return Reply(text=f'{{"score": {left[text].pop(0)}}}')

    for vote_by, expected in (("mean", [0.4, 0.5, None, 1.0]), ("median", [0.2, 0.5, None, 1.0])):
        left.update({text: list(votes) for text, votes in given.items()})
        with judge_server(answer) as server:
            fields: dict[str, Any] = {"num_votes": 3, "temperature": 0.7, "vote_by": vote_by, "model": vote_by, "concurrency": 1}
            found = judged_in(workspace, config_of(server.url, **fields), samples_of(1))
        assert [each.reward for each in found] == [None if value is None else pytest.approx(value) for value in expected]
        assert found[2].unjudged == JUDGE_UNREADABLE and len(server.bodies) == 12


def test_a_parameter_that_the_endpoint_refuses_is_left_out(workspace: Path) -> None:
    def answer(body: dict[str, Any], number: int) -> Reply:
        for name in ("response_format", "temperature", "max_tokens"):
            if name in body:
                return Reply(400, f"Unsupported parameter: '{name}'")
        return score_of_text(body, number)

    with judge_server(answer) as server:
        found = judged_in(workspace, config_of(server.url, concurrency=1))
        assert all(each.reward is not None for each in found) and len(server.bodies) == 12 + 3
        assert server.bodies[-1].keys() == {"model", "messages", "max_completion_tokens"}
        with pytest.raises(RewardFailed, match="HTTP 400"):
            judged_in(workspace, config_of(server.url, model="strict", answer="json_schema", max_unjudged_frac=0.0))


def test_a_pattern_reads_the_score_of_a_judge_that_writes_text(workspace: Path) -> None:
    texts = {
        "0-0": "Good.\nScore: 7",
        "0-1": "Score: 3 or Score: 4",
        "0-2": "<think>Score: 1</think>Score: 9",
        "0-3": "Score: 70",
    }
    with judge_server(lambda body, n: Reply(text=texts[body["messages"][-1]["content"]])) as server:
        fields: dict[str, Any] = {"rubric": "{completion}", "score_pattern": r"Score: (\d+)", "max_score": 10}
        found = judged_in(workspace, config_of(server.url, max_unjudged_frac=1.0, **fields), samples_of(1))
    assert [(each.reward, each.unjudged) for each in found] == [
        (7.0, ""),
        (None, JUDGE_UNREADABLE),
        (9.0, ""),
        (None, JUDGE_UNREADABLE),
    ]
    assert "response_format" not in server.bodies[0]


def test_a_score_in_thoughts_or_at_the_end_of_an_answer_that_was_cut_off_is_none(workspace: Path) -> None:
    cut = {
        "0-0": "<think>At first sight Score: 2, but",
        "0-1": "Score: 1",
        "0-2": "Score: 4. That is because",
        "0-3": "Let me see, Score: 2?</think>\nScore: 8, as",
        "1-0": "Let me see, Score: 2?</think>\nIt is",
    }
    whole = {"1-1": "Score: 1", "1-2": "Let me see, Score: 2?</think>\nScore: 8", "1-3": "<think>Score: 2, but"}

    def answer(body: dict[str, Any], number: int) -> Reply:
        text = body["messages"][-1]["content"]
        return Reply(text=cut[text], finish_reason="length") if text in cut else Reply(text=whole[text])

    with judge_server(answer) as server:
        fields: dict[str, Any] = {"rubric": "{completion}", "score_pattern": r"Score: (\d+)", "max_score": 10}
        found = judged_in(workspace, config_of(server.url, max_unjudged_frac=1.0, **fields), samples_of(2))
    assert [each.reward for each in found] == [None, None, 4.0, 8.0, None, 1.0, 8.0, None]
    assert {each.unjudged for each in found if each.reward is None} == {JUDGE_UNREADABLE}


def test_the_key_goes_to_the_endpoint_and_nowhere_else(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RATCHET_JUDGE_API_KEY", KEY)
    settings.cache_clear()
    caplog.set_level("DEBUG")
    replies = (Reply(raw=KEY.encode()), Reply(401, f"no {KEY}"), Reply(500, KEY))
    with judge_server(lambda body, n: replies[n % 3]) as server, pytest.raises(RewardFailed) as caught:
        judged_in(workspace, config_of(server.url, max_unjudged_frac=0.0, max_attempts=2))
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert KEY not in str(caught.value) + caplog.text + repr(settings())
    assert not [path for path in workspace.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def by_group(scores: dict[str, float], num: int | None = None) -> Reply:
    found = [{"trajectory_id": name, "explanation": "", "score": value} for name, value in scores.items()]
    return Reply(text=json.dumps({"scores": found[:num]}))


def test_ruler_compares_the_samples_of_a_group_in_one_request(workspace: Path) -> None:
    with judge_server(lambda body, n: by_group({"3": 0.3, "1": 0.1, "2": 0.2, "4": 0.4})) as server:
        found = judged_in(workspace, config_of(server.url, "ruler"))
    assert [each.reward for each in found] == [0.1, 0.2, 0.3, 0.4] * 3, "by the ids, in any order"
    assert len(server.bodies) == 3 and server.bodies[0]["messages"][1]["content"].count("<trajectory id=") == 4


RULER_FAULTS = {
    "fewer scores": by_group({"1": 0.1, "2": 0.2, "3": 0.3}),
    "an id twice": Reply(
        text=by_group({"1": 0.1, "2": 0.2, "3": 0.3}).text.replace("]", ', {"trajectory_id": "3", "score": 1}]')
    ),
    "an unknown id": by_group({"1": 0.1, "2": 0.2, "3": 0.3, "5": 0.4}),
    "a score above 1": by_group({"1": 0.1, "2": 0.2, "3": 0.3, "4": 4.0}),
    "no scores": Reply(text="{}"),
    "no object in the list": Reply(text='{"scores": [1, 2, 3, 4]}'),
    "prose": Reply(text="They are all fine."),
}


@pytest.mark.parametrize("fault", RULER_FAULTS)
def test_a_group_whose_answer_cannot_be_read_is_unjudged_and_the_others_are_not(workspace: Path, fault: str) -> None:
    good = by_group({"1": 0.1, "2": 0.2, "3": 0.3, "4": 0.4})
    with judge_server(lambda body, n: RULER_FAULTS[fault] if "1-0" in body["messages"][1]["content"] else good) as server:
        found = judged_in(workspace, config_of(server.url, "ruler"))
    assert [each.reward for each in found] == [0.1, 0.2, 0.3, 0.4, None, None, None, None, 0.1, 0.2, 0.3, 0.4]
    assert {each.unjudged for each in found[4:8]} == {JUDGE_UNREADABLE}


def test_a_group_of_one_is_unjudged_without_a_request_and_equal_samples_share_a_score(workspace: Path) -> None:
    samples = [*samples_of(1, 1), *(replace(each, text="same") for each in samples_of(2)[4:])]
    with judge_server(lambda body, n: by_group({"1": 0.6})) as server:
        found = judged_in(workspace, config_of(server.url, "ruler"), samples)
    assert [(each.reward, each.unjudged) for each in found] == [(None, ALONE), *[(0.6, "")] * 4] and len(server.bodies) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_url": ""}, "reward 'rubric' needs reward.judge.base_url"),
        ({"model": ""}, "reward 'rubric' needs reward.judge.model"),
        ({"rubric": ""}, "reward 'rubric' needs reward.judge.rubric"),
        ({"base_url": f"https://{KEY}@host/v1"}, "set RATCHET_JUDGE_API_KEY"),
        ({"base_url": f"https://host/v1?key={KEY}"}, "set RATCHET_JUDGE_API_KEY"),
        ({"base_url": "host/v1"}, "is no address: give one such as"),
        ({"score_pattern": "("}, "is no regular expression"),
        ({"score_pattern": "[0-9]"}, "has no group"),
        ({"min_score": 1.0}, "min_score 1 is not below max_score 1"),
        ({"num_votes": 3}, "num_votes 3 with temperature 0"),
        ({"max_run_cost": 1.0}, "max_run_cost 1 without prices"),
    ],
)
def test_a_judge_that_cannot_be_used_is_refused_in_one_line(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        config_of("http://127.0.0.1:1/v1", **fields)
    assert KEY not in one_line(caught.value), "as the command line and deployments show it"


def test_ruler_has_its_own_range_and_form() -> None:
    with pytest.raises(ValueError, match="reward 'ruler' gives scores from 0 to 1"):
        config_of("http://127.0.0.1:1/v1", "ruler", max_score=10.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Judge this.", "has no {completion}"),
        ("{completion} {price}", "at '{price}': known are {question}"),
        ('{completion} {"a": 1}', "double the braces that are text"),
        ("{completion.__class__}", "begins or ends no place"),
        ("{row[a][b]} {completion}", "begins or ends no place"),
    ],
)
def test_a_rubric_with_an_unknown_place_is_refused_before_the_run(workspace: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        rewards.check(config_of("http://127.0.0.1:1/v1", rubric=text))
    assert "\n" not in str(caught.value)


def test_a_rubric_may_be_a_file_and_its_columns_are_checked_before_the_run(workspace: Path) -> None:
    (workspace / "rubric.txt").write_text("{completion} <{completion}> {row[tags]}")
    config = config_of("http://127.0.0.1:1/v1", rubric=str(workspace / "rubric.txt"))
    rewards.check(config)
    by_model.check_columns(config, "my.jsonl", ["level", "tags"])
    with pytest.raises(ValueError, match=re.escape("uses {row[tags]}, and data set 'my.jsonl' has no such column; it has level")):
        by_model.check_columns(config, "my.jsonl", ["level"])
    before = rewards.source_digests(config)
    (workspace / "rubric.txt").write_text("{completion}")
    assert rewards.source_digests(config) != before, "another rubric is another reward"
    with pytest.raises(ValueError, match="cannot be read"):
        rewards.check(config_of("http://127.0.0.1:1/v1", rubric=str(workspace / "missing.md")))


def test_a_scored_step_has_the_answers_their_digest_and_what_they_cost(workspace: Path) -> None:
    folder = StepFolder.at("r", 3)
    samples, asked = (
        write_samples(folder.samples, samples_of()),
        write_json_lines(folder.prompts, (each._asdict() for each in PROMPTS)),
    )
    place: dict[str, Any] = {"run": "r", "step": 3}
    counts: dict[str, Any] = {"num_prompts": 3, "group_size": 4, "temperature": 1.0, "num_samples": 12}
    rollouts = Rollouts(
        **place, **counts, adapter_version=3, adapter_sha256="abc", file=record_of(samples), num_output_tokens=12, num_truncated=0
    )
    with judge_server(score_of_text) as server:
        config = config_of(server.url, max_run_tokens=13200)
        scored = score.fn(
            config, rollouts, PromptBatch(**place, file=record_of(asked), num_prompts=3, dataset_fingerprint="", first_row=0)
        )
    assert scored.judgements == record_of(folder.judgements) and scored.mean_reward == pytest.approx(0.15)
    trained = {"peak_memory_gib": 0.0, "metrics": {}, "seconds": {}}
    metrics = metrics_of(rollouts, scored, trained, measures_of("r", 3))
    assert {name: value for name, value in metrics.items() if name.startswith("judge/")} == {
        "judge/requests": 12.0,
        "judge/input_tokens": 1200.0,
        "judge/output_tokens": 120.0,
        "judge/run_tokens": 1320.0,
        "judge/budget_used_frac": 0.1,
    }
    assert json.loads(answers_of_judge(folder)[1, 2])["score"] == 0.2
    row: dict[str, object] = {"reward": 0.2, "advantage": 0.0, "prompt": "1+1?", "completion": "1-2", "judge": "because"}
    assert "Its judge:\n\n```text\nbecause\n```" in samples_section([row]) and "Its judge" not in samples_section(
        [row | {"judge": ""}]
    )


def test_figures_of_evaluations_are_comparable_wherever_the_judge_is_and_not_with_another_rubric() -> None:
    def digest(**judge: object) -> str:
        reward = config_of("http://127.0.0.1:1/v1").model_dump() | {
            "judge": config_of("http://127.0.0.1:1/v1", **judge).judge.model_dump()
        }
        return eval_digest(RunConfig.model_validate({"reward": reward}).eval_config)

    assert digest() == digest(base_url="http://127.0.0.1:2/v1", concurrency=1, max_run_tokens=5)
    assert digest() != digest(rubric="{completion}") != digest(model="judge-2")
    unused = RunConfig.model_validate({"reward": {"judge": {"model": "other"}}})
    assert eval_digest(unused.eval_config) == eval_digest(RunConfig().eval_config), "a judge that is not used changes nothing"
