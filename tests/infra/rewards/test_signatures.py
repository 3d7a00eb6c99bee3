"""Each form in which a reward may be written is found by its parameters and gets what it names; TRL's and verl's files run unchanged."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.config import RewardConfig
from infra.data.prompts import JSON, Prompt
from infra.rewards import client
from infra.rewards.outcome import Outcome
from infra.rewards.scores import fields_of
from infra.store.samples import Sample

# In the forms that TRL's documentation gives (docs/source/grpo_trainer.md, custom reward functions): token ids, messages, columns.
TRL = {
    "num_tokens": (
        "def num_tokens(completion_ids, trainer_state, **kwargs):\n    return [float(len(ids)) for ids in completion_ids]\n",
        [2.0, 2.0, 2.0],
    ),
    "has_form": (
        "def has_form(completions, **kwargs):\n"
        "    texts = [turns[0]['content'] for turns in completions]\n"
        "    return [float(text.startswith('<think>') and text.endswith('</answer>')) for text in texts]\n",
        [1.0, 0.0, 0.0],
    ),
    "truth": (
        "def truth(completions, ground_truth, **kwargs):\n"
        "    contents = [completion[0]['content'] for completion in completions]\n"
        "    return [1.0 if c == gt else None if c == 'who knows' else 0.0 for c, gt in zip(contents, ground_truth)]\n",
        [0.0, 1.0, None],
    ),
}
# In the form that verl's documentation gives (docs/preparation/reward_function.rst).
VERL = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "mine"
    return {"score": float(solution_str == ground_truth), "index": extra_info["index"], "pred": solution_str}
"""
TEXTS = ["<think>a</think><answer>b</answer>", "7", "who knows"]


@pytest.fixture(autouse=True)
def _ends_pools(workspace: Path) -> Iterator[None]:
    yield
    client.close_all()


def outcomes(folder: Path, function: str, code: str, row: dict[str, JSON] | None = None, **fields: float) -> list[Outcome]:
    (folder / "mine.py").write_text(code)
    config = RewardConfig.model_validate({"name": f"{folder}/mine.py:{function}", "workers": 2, **fields})
    prompt = Prompt(3, 0, "3 + 4?", "7", [1, 2], 0, row or {})
    samples = [Sample(3, n, [1, 2], [5, n], [-0.1, -0.1], "stop", 0, "", text) for n, text in enumerate(TEXTS)]
    takes = client.form_of(config, config.called[0], code).takes
    found: dict[int, Outcome] = {}
    client.judge(config, config.called[0], code, [fields_of(each, prompt, takes, samples) for each in samples], found.__setitem__)
    return [found[n] for n in range(len(TEXTS))]


@pytest.mark.parametrize("name", TRL)
def test_a_file_written_for_trl_runs_unchanged(tmp_path: Path, name: str) -> None:
    code, rewards = TRL[name]
    row: dict[str, JSON] = {"prompt": [{"role": "user", "content": "3 + 4?"}], "ground_truth": "7"}
    assert [each.reward for each in outcomes(tmp_path, name, code, row)] == rewards


def test_trl_gets_text_where_the_prompt_is_text(tmp_path: Path) -> None:
    code = "def score(prompts, completions, **columns):\n    return [len(p) + len(c) for p, c in zip(prompts, completions)]\n"
    assert [each.reward for each in outcomes(tmp_path, "score", code)] == [float(6 + len(text)) for text in TEXTS]


def test_a_file_written_for_verl_runs_unchanged(tmp_path: Path) -> None:
    row: dict[str, JSON] = {
        "data_source": "mine",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 5},
    }
    found = outcomes(tmp_path, "compute_score", VERL, row)
    assert [each.reward for each in found] == [0.0, 1.0, 0.0]
    assert found[1].parts == {"index": 5.0}


def test_a_function_gets_what_it_names(tmp_path: Path) -> None:
    code = """def score(*, completion, messages, row, question, answer, prompt_tokens, output_tokens, finish_reason, group, sample_index):
    assert messages == [{"role": "user", "content": question}, {"role": "assistant", "content": completion}], messages
    assert row == {"level": 2, "tags": ["a"]} and (question, answer) == ("3 + 4?", "7") and finish_reason == "stop"
    assert prompt_tokens == [1, 2] and output_tokens == [5, sample_index]
    mine = group[sample_index]
    assert mine == {"sample_index": sample_index, "completion": completion, "finish_reason": "stop", "num_output_tokens": 2}
    return sum(len(each["completion"]) < len(completion) for each in group)
"""
    assert [each.reward for each in outcomes(tmp_path, "score", code, {"level": 2, "tags": ["a"]})] == [2.0, 0.0, 1.0]


def test_a_batch_gets_lists_and_a_bad_sample_in_it_costs_no_other(tmp_path: Path) -> None:
    code = """def score(*, completions, rows, answers):
    assert len(completions) == len(rows) == len(answers)
    if "who knows" in completions: raise KeyError(len(completions))
    return [float(c == a) for c, a in zip(completions, answers)]
"""
    found = outcomes(tmp_path, "score", code)
    assert [each.reward for each in found] == [0.0, 1.0, None]
    assert found[2].message.startswith("raised KeyError: 1 at ")
    hangs = code.replace("raise KeyError(len(completions))", "__import__('time').sleep(60)")
    found = outcomes(tmp_path, "score", hangs, timeout_s=1.0)
    assert [(each.reward, each.reason) for each in found] == [(0.0, ""), (1.0, ""), (None, "time-out")]
    short = outcomes(tmp_path, "score", "def score(completions):\n    return [1.0]\n")
    assert {each.message for each in short} == {"returned 1 values for 3 samples: a list with a number for each is needed"}


def test_an_async_reward_is_called_many_times_at_once_and_one_that_waits_too_long_costs_no_other(tmp_path: Path) -> None:
    code = """import asyncio
under_way, most = 0, 0
async def score(*, completion):
    global under_way, most
    under_way, most = under_way + 1, max(most, under_way + 1)
    await asyncio.sleep(60 if completion == "7" else 0.1)
    under_way -= 1
    return most
"""
    found = outcomes(tmp_path, "score", code, timeout_s=1.0)
    assert [(each.reward, each.reason) for each in found] == [(3.0, ""), (None, "time-out"), (3.0, "")]
    assert {each.reward for each in outcomes(tmp_path, "score", code.replace("60 if", "0.1 if"), concurrency=1)} == {1.0}


def test_a_class_is_set_up_once_in_a_worker(tmp_path: Path) -> None:
    code = """class Judge:
    count = 0
    def setup(self): Judge.count += 1
    def __call__(self, *, completion, answer): return self.count + 10 * (completion == answer)
"""
    assert [each.reward for each in outcomes(tmp_path, "Judge", code)] == [1.0, 11.0, 1.0]
    with pytest.raises(ValueError, match=r"cannot be set up: KeyError: 'model' at .*mine\.py:3"):
        outcomes(tmp_path, "Judge", code.replace("Judge.count += 1", "raise KeyError('model')"))
    with pytest.raises(ValueError, match="is a class without __call__"):
        outcomes(tmp_path, "Judge", "class Judge:\n    def score(self): ...\n")
