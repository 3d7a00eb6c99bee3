"""Rewards in a user's file: imported from anywhere, never mixed up, digested with what they import, refused in one line."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from infra.config import DataConfig, RewardConfig
from infra.failures import RewardFailed
from infra.rewards import client
from infra.rewards.outcome import Outcome
from infra.store import code_digest
from tasks import rewards
from tasks.rewards.own_answers import check_there

REWARD = "def score(*, question, completion, answer):\n    return {}\n"


@pytest.fixture(autouse=True)
def _ends_pools(workspace: Path) -> Iterator[None]:
    before = set(sys.modules)
    yield
    client.close_all()
    users = ("helper", "late", "judging", "usual_rewards", "reward_file_", "mine")
    assert not [name for name in set(sys.modules) - before if name.startswith(users)], "only workers import a user's files"


def outcome_of(name: str) -> Outcome:
    config, digest = RewardConfig(name=name, workers=1), rewards.source_digest(name)
    found: dict[int, Outcome] = {}
    fields = orjson.dumps({"question": "q", "completion": "c", "answer": "a"})
    client.judge(config, config.called[0], digest, [fields], found.__setitem__)
    return found[0]


def scored(name: str) -> float | None:
    return outcome_of(name).reward


def test_files_of_one_name_have_their_own_modules_also_those_imported_later(tmp_path: Path) -> None:
    names = []
    for number, folder in enumerate((tmp_path / "a", tmp_path / "b", tmp_path / "a/inner"), 1):
        folder.mkdir()
        (folder / "mine.py").write_text(
            "import helper\ndef score(*, question, completion, answer):\n    import late\n    return helper.VALUE + late.VALUE\n"
        )
        (folder / "helper.py").write_text(f"VALUE = {number}\n")
        (folder / "late.py").write_text(f"VALUE = {number / 10}\n")
        names.append(f"{folder}/mine.py:score")
    assert [scored(name) for name in names] == [1.1, 2.2, 3.3]
    assert [scored(name) for name in names] == [1.1, 2.2, 3.3]
    assert not {str(tmp_path / "a"), str(tmp_path / "b")} & set(sys.path)


def test_a_changed_file_is_not_taken_for_what_the_process_began_with(tmp_path: Path) -> None:
    """The program that imported it lives as long as the process; another one, in its place, would score in the name of the old file."""
    mine, name = tmp_path / "mine.py", f"{tmp_path}/mine.py:score"
    mine.write_text(REWARD.format("helper.VALUE").replace("def", "import helper\ndef", 1))
    helper = tmp_path / "helper.py"
    helper.write_text("VALUE = 1.0\n")
    assert scored(name) == 1.0
    helper.write_text("VALUE = 2.0\n")
    assert scored(name) == 1.0, "by the program that has imported it"
    client.close_all()  # or it is killed, or others take its place
    with pytest.raises(RewardFailed, match=r"reward '.*mine.py:score': .*helper.py has changed since this process began"):
        scored(name)
    helper.write_text("VALUE = 1.0  # as it was\n")
    assert scored(name) == 1.0
    client.close_all()
    helper.write_text("VALUE = 2.0\n")
    code_digest.digest_of_file.cache_clear()  # another process
    assert scored(name) == 2.0


def test_a_module_on_pythonpath_is_not_mixed_up_with_a_file_with_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, value in (("usual", 5), ("own", 7)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper.py").write_text(f"VALUE = {value}\n")
        (tmp_path / folder / "usual_rewards.py").write_text("import helper\n" + REWARD.format("helper.VALUE"))
    monkeypatch.syspath_prepend(tmp_path / "usual")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "usual"))
    assert scored("usual_rewards.score") == 5
    assert scored(f"{tmp_path}/own/usual_rewards.py:score") == 7
    assert scored("usual_rewards.score") == 5


def test_a_file_in_a_package_imports_relatively(tmp_path: Path) -> None:
    package = tmp_path / "judging"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text("VALUE = 3.0\n")
    (package / "main.py").write_text("from .words import VALUE\n" + REWARD.format("VALUE"))
    assert scored(f"{package}/main.py:score") == 3.0


def test_a_file_may_be_called_as_a_module_of_python(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(REWARD.format("0.5"))
    assert scored(f"{tmp_path}/json.py:score") == 0.5
    before = rewards.source_digest(f"{tmp_path}/json.py:score")
    (tmp_path / "json.py").write_text(REWARD.format("0.75"))
    code_digest.digest_of_file.cache_clear()
    assert rewards.source_digest(f"{tmp_path}/json.py:score") != before


def test_the_digest_covers_the_file_and_what_it_imports_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import helper\n" + REWARD.format("0.0"))
    (tmp_path / "helper.py").write_text("def value():\n    import late\n")
    (tmp_path / "late.py").write_text("VALUE = 1\n")
    (tmp_path / "other.py").write_text("VALUE = 1\n")
    name = f"{tmp_path}/mine.py:score"

    def digest() -> str:
        code_digest.digest_of_file.cache_clear()
        return rewards.source_digest(name)

    seen = [digest()]
    for file in ("mine.py", "helper.py", "late.py"):
        (tmp_path / file).write_text((tmp_path / file).read_text() + "MORE = 1\n")
        seen.append(digest())
    assert len(set(seen)) == 4
    (tmp_path / "other.py").write_text("VALUE = 2\n")
    (tmp_path / "mine.py").write_text("# a remark\n" + (tmp_path / "mine.py").read_text())
    assert digest() == seen[-1], "neither a remark nor a file that is not imported counts"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (REWARD, "mien.py:score", "reward file {folder}/mien.py does not exist; the nearest is mine.py"),
        (
            REWARD,
            "mine.py:scroe",
            "reward '{folder}/mine.py:scroe' does not exist; the nearest is score; functions and classes there: score",
        ),
        ("x = 1\n", "mine.py:score", "reward '{folder}/mine.py:score' does not exist; there is no function or class in it"),
        ("def score(:\n", "mine.py:score", "reward file {folder}/mine.py, line 1, is not valid Python: invalid syntax"),
        ("\0", "mine.py:score", "reward file {folder}/mine.py"),
        (
            "\nimport no_such\n",
            "mine.py:score",
            "reward '{folder}/mine.py:score' cannot be imported: No module named 'no_such' at {folder}/mine.py:2",
        ),
        (
            "\n1 / 0\n",
            "mine.py:score",
            "reward '{folder}/mine.py:score' cannot be imported: ZeroDivisionError: division by zero at {folder}/mine.py:2",
        ),
        (
            "raise SystemExit('usage')\n",
            "mine.py:score",
            "reward '{folder}/mine.py:score' cannot be imported: SystemExit: usage at {folder}/mine.py:1",
        ),
        (
            "def score(text): ...\n",
            "mine.py:score",
            "reward '{folder}/mine.py:score' has a parameter 'text': it must take some of the keywords completion, messages",
        ),
        (REWARD, "mine.py:", "reward '{folder}/mine.py:' is unknown; known are gsm8k_verl_strict"),
    ],
)
def test_a_file_that_has_no_such_reward_is_refused_in_one_line(tmp_path: Path, text: str, name: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError) as caught:
        rewards.check(RewardConfig(name=f"{tmp_path}/{name}"))
    assert str(caught.value).startswith(message.format(folder=tmp_path)) and "\n" not in str(caught.value)


def test_a_relative_path_is_refused_outside_of_the_command_line() -> None:
    with pytest.raises(
        ValueError, match=r"reward 'mine\.py:score' has a relative path: outside of the command line give it in full"
    ):
        rewards.check(RewardConfig(name="mine.py:score"))


def test_a_failing_reward_names_the_line_in_the_users_file(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import json\ndef read(text):\n    return json.loads(text)\n")
    (tmp_path / "mine.py").write_text("import helper\n" + REWARD.format("helper.read(completion)"))
    said = outcome_of(f"{tmp_path}/mine.py:score").message
    assert said.endswith(f" at {tmp_path}/helper.py:3") and "\n" not in said


def test_the_digest_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from helper import value\n" + REWARD.format("value"))
    (tmp_path / "helper.py").write_text("raise SystemExit('imported')\n")
    assert len(rewards.source_digest(f"{tmp_path}/mine.py:score")) == 64


def test_a_reward_gets_the_variables_that_are_named_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\n" + REWARD.format("float(len(os.environ.get('MY_KEY', '')) + 10 * ('HF_TOKEN' in os.environ))")
    )
    monkeypatch.setenv("MY_KEY", "four")
    monkeypatch.setenv("HF_TOKEN", "secret")
    found = {}
    for names in ((), ("MY_KEY",)):
        config = RewardConfig(name=f"{tmp_path}/mine.py:score", environment=names)
        outcomes: dict[int, Outcome] = {}
        client.judge(
            config,
            config.called[0],
            "",
            [orjson.dumps({"question": "q", "completion": "c", "answer": "a"})],
            outcomes.__setitem__,
        )
        found[names] = outcomes[0].reward
    assert found == {(): 0.0, ("MY_KEY",): 4.0}
    with pytest.raises(ValueError, match=r"reward\.environment names 'NO_SUCH', which is not set"):
        rewards.check(RewardConfig(name=f"{tmp_path}/mine.py:score", environment=("NO_SUCH",)))
    with pytest.raises(ValueError, match="give names alone"):
        RewardConfig(environment=("MY_KEY=four",))


NO_ANSWERS = '{"question": "1 + 1?", "solution": "2"}\n'
ANSWERS = '{"question": "1 + 1?", "answer": "2"}\n'
NO_ONE_HAS_AN_ANSWER = "and none of the 1 rows of data set '{data}' has an answer: name their column with data.answer_column "


def refused(tmp_path: Path, code: str, lines: str, **fields: str) -> str | None:
    """What is said of a data set and the function of a reward file. None: nothing."""
    (tmp_path / "mine.py").write_text(code)
    (data := tmp_path / f"data-{len(lines)}.jsonl").write_text(lines)  # rows of a file are read once
    try:
        config = RewardConfig(name=f"{tmp_path}/mine.py:score", workers=1)
        check_there(config, DataConfig(source=str(data), **fields))  # type: ignore[arg-type]
    except ValueError as error:
        return str(error).replace(str(data), "{data}")
    return None


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ("*, completion, answer", "answer"),
        ("*, completions, answers", "answers"),
        ("prompts, completions, answer, **columns", "answer"),
        ("data_source, solution_str, ground_truth, extra_info=None", "ground_truth"),
    ],
)
def test_a_reward_that_takes_answers_is_refused_where_no_row_has_one(tmp_path: Path, parameters: str, named: str) -> None:
    """They would be empty texts, and every sample would be judged by them."""
    code = f"def score({parameters}): return 0.0\n"
    said = refused(tmp_path, code, NO_ANSWERS)
    assert said and f"mine.py:score' takes '{named}', {NO_ONE_HAS_AN_ANSWER}(there are question, solution)" in said
    assert said.endswith(f", or give the parameter a default, such as {named}=''")
    assert refused(tmp_path, code, NO_ANSWERS, answer_column="solution") is None
    assert refused(tmp_path, code, ANSWERS) is None


def test_a_reward_that_can_do_without_answers_needs_none(tmp_path: Path) -> None:
    for parameters in ("*, completion", "*, completion, answer=''", "*, completion, **columns", "*, completion, row"):
        assert refused(tmp_path, f"def score({parameters}): return 0.0\n", NO_ANSWERS) is None, parameters


def test_a_reward_in_verl_s_form_may_find_the_truth_in_the_row(tmp_path: Path) -> None:
    row = '{"question": "1 + 1?", "reward_model": {"ground_truth": "2"}}\n'
    assert refused(tmp_path, "def score(solution_str, ground_truth): return 0.0\n", row) is None


def test_each_of_several_sources_needs_answers(tmp_path: Path) -> None:
    for name, lines in {"with": ANSWERS, "without": NO_ANSWERS}.items():
        (tmp_path / f"{name}.jsonl").write_text(lines)
    (tmp_path / "mine.py").write_text("def score(*, answer): return 0.0\n")
    data = DataConfig(sources=(f"{tmp_path}/with.jsonl", f"{tmp_path}/without.jsonl"))
    with pytest.raises(
        ValueError, match=r"takes 'answer', and none of the 1 rows of data set '[^']*/without.jsonl' has an answer"
    ):
        check_there(RewardConfig(name=f"{tmp_path}/mine.py:score", workers=1), data)


def test_a_column_that_a_reward_of_trl_s_form_takes_has_to_be_there(tmp_path: Path) -> None:
    code = "def score(prompts, completions, level, trainer_state, easy=None, **columns): return [0.0]\n"
    assert refused(tmp_path, code, ANSWERS) == (
        f"reward '{tmp_path}/mine.py:score' takes 'level', and data set '{{data}}' has no such column; it has question, answer"
    )
    assert refused(tmp_path, code, ANSWERS.replace("}", ', "level": 3}')) is None


def test_a_rubric_that_uses_answers_is_refused_where_no_row_has_one(tmp_path: Path) -> None:
    (data := tmp_path / "data.jsonl").write_text(NO_ANSWERS)
    judge = {"base_url": "http://127.0.0.1:1", "model": "m", "rubric": "{completion} or {answer}?"}
    config = RewardConfig.model_validate({"name": "rubric", "judge": judge})
    message = f"reward.judge.rubric uses {{answer}}, {NO_ONE_HAS_AN_ANSWER}".replace("{data}", str(data))
    with pytest.raises(ValueError, match=re.escape(message)):
        check_there(config, DataConfig(source=str(data)))
    check_there(config, DataConfig(source=str(data), answer_column="solution"))
    judge["rubric"] = "{completion} {{answer}} {row[solution]}"
    check_there(RewardConfig.model_validate({"name": "rubric", "judge": judge}), DataConfig(source=str(data)))
