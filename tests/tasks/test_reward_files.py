"""Rewards in a user's file: imported from anywhere, never mixed up, digested with what they import, refused in one line."""

import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from infra.config import RewardConfig
from infra.rewards import client
from infra.rewards.outcome import Outcome
from infra.store import code_digest
from tasks import rewards

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
