"""Rewards in a user's file: imported from anywhere, never mixed up, digested with what they import, refused in one line."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from infra.failures import RewardFailed
from infra.store import code_digest
from tasks import rewards
from tasks.rewards import user_files

REWARD = "def score(*, question, completion, answer):\n    return {}\n"


@pytest.fixture(autouse=True)
def _imports_as_before() -> Iterator[None]:
    before = dict(sys.modules)
    yield
    with user_files.importing_from(None):
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in ("helper", "late", "judging", "usual_rewards") or name.startswith("reward_file_"):
                del sys.modules[name]


def scored(name: str) -> float:
    return sum(rewards.called(name, rewards.find(name), question="q", completion="c", answer="a").values())


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


def test_a_module_on_pythonpath_is_back_after_a_file_with_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, value in (("usual", 5), ("own", 7)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper.py").write_text(f"VALUE = {value}\n")
        (tmp_path / folder / "usual_rewards.py").write_text("import helper\n" + REWARD.format("helper.VALUE"))
    monkeypatch.syspath_prepend(tmp_path / "usual")
    assert scored("usual_rewards.score") == 5
    usual = sys.modules["helper"]
    assert scored(f"{tmp_path}/own/usual_rewards.py:score") == 7
    assert sys.modules["helper"] is not usual
    assert scored("usual_rewards.score") == 5
    assert sys.modules["helper"] is usual


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
        (REWARD, "mine.py:scroe", "reward '{folder}/mine.py:scroe' does not exist; the nearest is score; functions there: score"),
        ("x = 1\n", "mine.py:score", "reward '{folder}/mine.py:score' does not exist; there is no function in it"),
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
            "reward '{folder}/mine.py:score' must take the keywords question, completion",
        ),
        (REWARD, "mine.py:", "reward '{folder}/mine.py:' is unknown; known are gsm8k_verl_strict"),
    ],
)
def test_a_file_that_has_no_such_reward_is_refused_in_one_line(tmp_path: Path, text: str, name: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError) as caught:
        rewards.find(f"{tmp_path}/{name}")
    assert str(caught.value).startswith(message.format(folder=tmp_path)) and "\n" not in str(caught.value)


def test_a_relative_path_is_refused_outside_of_the_command_line() -> None:
    with pytest.raises(
        ValueError, match=r"reward 'mine\.py:score' has a relative path: outside of the command line give it in full"
    ):
        rewards.find("mine.py:score")


def test_a_failing_reward_names_the_line_in_the_users_file(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import json\ndef read(text):\n    return json.loads(text)\n")
    (tmp_path / "mine.py").write_text("import helper\n" + REWARD.format("helper.read(completion)"))
    with pytest.raises(RewardFailed) as caught:
        scored(f"{tmp_path}/mine.py:score")
    said = str(caught.value)
    assert f" at {tmp_path}/helper.py:3, for question 'q', completion 'c'" in said and "\n" not in said


class Lazy(ModuleType):
    """A module that imports what it does not have, as those of transformers do."""

    def __getattr__(self, name: str) -> object:
        raise ModuleNotFoundError(f"no module for {name}")


def test_modules_that_import_late_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(REWARD.format("1.0"))
    monkeypatch.setitem(sys.modules, "lazy_of_this_test", Lazy("lazy_of_this_test"))
    assert scored(f"{tmp_path}/a/mine.py:score") == scored(f"{tmp_path}/b/mine.py:score") == 1.0
