"""The example tools: what they answer, and what they refuse."""

from pathlib import Path

import pytest

from infra.environments.examples import tools
from infra.environments.examples.tools import calculate, run_python, search_in


def test_the_calculator_computes_numbers_and_nothing_else() -> None:
    assert [calculate(each) for each in ("2 + 3 * 4", "(2 + 3) * -4", "7 / 2", "7 // 2 % 2")] == ["14", "-20", "3.5", "1"]
    for text in ("__import__('os')", "'a' * 9", "2 ** 9", "x"):
        with pytest.raises(ValueError, match="is no number and no known operation"):
            calculate(text)
    with pytest.raises(ValueError, match="has 201 characters, 200 are allowed"):
        calculate("1" * 201)


def test_the_search_finds_lines_of_its_folder_only(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("blue moon")
    folder = tmp_path / "here/sub"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("A blue sky\n a red sky\nBlue and red\n")
    (folder / "b.txt").symlink_to(tmp_path / "secret.txt")
    search = search_in(tmp_path / "here")
    assert search("blue") == ["sub/a.txt:1: A blue sky", "sub/a.txt:3: Blue and red"]
    assert search("RED blue") == ["sub/a.txt:3: Blue and red"]
    assert search("blue", limit=1) == ["sub/a.txt:1: A blue sky"]
    assert search.schema["function"]["parameters"]["required"] == ["words"]


def test_python_has_limits_and_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    assert run_python("print(6 * 7)") == "42\n"
    assert "hunter2" not in run_python("import os; print(os.environ)")
    assert "ZeroDivisionError" in run_python("1 / 0")
    assert len(run_python("print('x' * 9999)")) == tools.MAX_PRINTED
    monkeypatch.setattr(tools, "PYTHON_TIMEOUT_S", 0.5)
    with pytest.raises(TimeoutError, match=r"took longer than 0.5 s"):
        run_python("while True: pass")
