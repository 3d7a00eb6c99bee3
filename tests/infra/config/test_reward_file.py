"""A reward's file is named from where the command runs, and kept by its absolute path."""

from pathlib import Path

import pytest

from infra.config import RunConfig
from infra.config.tools import grid
from infra.config.tools.reward_file import RewardFile, absolute, absolute_functions, absolute_in_sweep

REWARD = "def score(*, question, completion, answer):\n    return 1.0\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub/pkg").mkdir(parents=True)
    (tmp_path / "mine.py").write_text(
        f"{REWARD}def helper(text):\n    return text\ndef _other(question, completion, answer): ...\n"
    )
    (tmp_path / "two.py").write_text(REWARD + REWARD.replace("score", "second"))
    (tmp_path / "none.py").write_text("def helper(text):\n    return text\n")
    (tmp_path / "wrong.py").write_text("x = 1\ndef score(:\n")
    (tmp_path / "sub/mine.py").write_text(REWARD)
    (tmp_path / "sub/pkg/__init__.py").write_text(REWARD)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("mine.py:score", "mine.py:score"),
        ("./sub/../mine.py:score", "mine.py:score"),
        ("mine.py", "mine.py:score"),
        ("mine.score", "mine.py:score"),
        ("sub/mine.py:score", "sub/mine.py:score"),
        ("sub.mine.score", "sub/mine.py:score"),
        ("sub.pkg.score", "sub/pkg/__init__.py:score"),
        ("not_there.py:score", "not_there.py:score"),
    ],
)
def test_a_path_starts_where_the_command_runs(folder: Path, name: str, path: str) -> None:
    assert absolute(name, folder) == f"{folder.resolve()}/{path}"
    assert absolute(absolute(name, folder), Path("/")) == absolute(name, folder)


@pytest.mark.parametrize(
    "name", ["gsm8k_numeric", "installed.module.score", "tasks.rewards.gsm8k.numeric", "", "a:b", "..mine.score"]
)
def test_other_names_stay_as_they_are(folder: Path, name: str) -> None:
    (folder / "tasks/rewards").mkdir(parents=True)
    (folder / "tasks/rewards/gsm8k.py").write_text(REWARD)
    assert absolute(name, folder) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two.py", "reward.name 'two.py' names no function, and it has score, second: give one, such as two.py:score"),
        ("none.py", "reward.name 'none.py' names no function, and it has helper: give one, such as none.py:helper"),
        ("mien.py", "reward file {folder}/mien.py does not exist; the nearest is mine.py"),
        ("there/mine.py", "reward file {folder}/there/mine.py does not exist; the folder {folder}/there does not exist"),
        ("wrong.py", "reward file {folder}/wrong.py, line 2, is not valid Python: invalid syntax"),
    ],
)
def test_a_file_without_its_one_reward_is_refused_with_what_it_has(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        absolute(name, folder)
    assert str(caught.value) == message.format(folder=folder.resolve())


def test_the_values_of_a_sweep_are_named_alike_and_its_runs_have_short_names(folder: Path) -> None:
    over = absolute_in_sweep("reward.name=mine.py:score, gsm8k_numeric", folder)
    assert over == f"reward.name={folder.resolve()}/mine.py:score,gsm8k_numeric"
    assert [run.name for run in grid.variants(RunConfig(name="s"), [over])] == ["s-name-mine.score", "s-name-gsm8k_numeric"]
    assert absolute_in_sweep("model=mine.py:score", folder) == "model=mine.py:score"
    assert absolute_in_sweep("environment.name=mine.py:Game,a.b.run", folder) == (
        f"environment.name={folder.resolve()}/mine.py:Game,a.b.run"
    )


def test_a_name_is_that_of_a_file_by_its_ending() -> None:
    assert RewardFile.parse("/a/b.py:score") == RewardFile(Path("/a/b.py"), "score")
    assert RewardFile.parse("a.b.score") is RewardFile.parse("b:score") is None


def test_paths_of_several_rewards_start_where_the_command_runs_too(folder: Path) -> None:
    functions = [{"name": "mine.py", "weight": 0.5}, {"name": "gsm8k_numeric"}, "no function"]
    assert absolute_functions(functions, folder) == [
        {"name": f"{folder.resolve()}/mine.py:score", "weight": 0.5},
        {"name": "gsm8k_numeric"},
        "no function",
    ]
