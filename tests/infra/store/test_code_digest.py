import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.store import code_digest

SCORE = '''
"""Give every sample its reward."""

from tasks import rewards
import infra.store.files, json


class Sample:
    text: str
    """What was said."""


def score(sample):
    """One reward."""
    import prefect
    from infra.late import helper

    return rewards.find(sample.text)
'''

Change = Callable[[str, str], str]


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    """Write a file of a small checkout, and give the digest of `tasks.score` as a new process would see it."""
    monkeypatch.setattr(code_digest, "CHECKOUT", tmp_path)

    def write(path: str, text: str) -> str:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        return digest("tasks.score")

    for package in ("flows", "tasks", "infra", "tasks/rewards", "infra/program"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    write("infra/deep.py", "x = 1")
    write("infra/late.py", "def helper(): return 1")
    write("infra/store/files.py", "from infra.deep import x")
    write("infra/other.py", "x = 1")
    write("infra/program/__main__.py", "x = 1")
    write("tasks/rewards/__init__.py", "from tasks.rewards.gsm8k import reward")
    write("tasks/rewards/gsm8k.py", "reward = 1")
    write("tasks/score.py", SCORE)
    return write


def digest(*modules: str) -> str:
    for function in (code_digest.digest, code_digest.digest_of_file, code_digest._imports):
        function.cache_clear()
    return code_digest.digest(*modules)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""One reward."""', '"""The reward."""'),
        ('"""One reward."""', ""),
        ('"""What was said."""', '"""The text."""'),
        ('"""Give every sample its reward."""', ""),
        ("def score", "# why\n\n\ndef score"),
        ("rewards.find(sample.text)", "rewards.find(\n        sample.text,  # here\n    )"),
    ],
)
def test_words_and_layout_are_not_seen(change: Change, old: str, new: str) -> None:
    before = digest("tasks.score")
    assert old in SCORE
    assert change("tasks/score.py", SCORE.replace(old, new)) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return rewards", "rewards"),
        ("sample.text)", "sample.text or '')"),
        ("text: str", "text: bytes"),
        ("class Sample", "@final\nclass Sample"),
        ("import prefect", "import mlflow"),
    ],
)
def test_a_changed_statement_is_seen(change: Change, old: str, new: str) -> None:
    before = digest("tasks.score")
    assert old in SCORE
    assert change("tasks/score.py", SCORE.replace(old, new)) != before


@pytest.mark.parametrize(
    "path",
    ["infra/store/files.py", "infra/deep.py", "infra/late.py", "tasks/rewards/__init__.py", "tasks/rewards/gsm8k.py"],
    ids=["imported", "imported by an import", "imported in a function", "package", "module of the package"],
)
def test_a_change_of_what_is_imported_is_seen_and_undone_by_its_undoing(change: Change, path: str, tmp_path: Path) -> None:
    before, text = digest("tasks.score"), (tmp_path / path).read_text()
    assert change(path, text + "\nnew = 1") != before
    assert change(path, text) == before


@pytest.mark.parametrize("path", ["infra/other.py", "infra/program/__main__.py", "flows/step.py", "infra/json.py"])
def test_a_change_of_what_is_not_imported_is_not_seen(change: Change, path: str) -> None:
    before = digest("tasks.score")
    assert change(path, "new = 1") == before


def test_a_program_counts_with_all_its_modules_where_it_is_named(change: Change) -> None:
    before, alone = digest("tasks.score", "infra.program"), digest("tasks.score")
    assert change("infra/program/loss.py", "x = 1") == alone
    assert digest("tasks.score", "infra.program") != before


def test_the_same_text_in_another_file_is_other_code(change: Change, tmp_path: Path) -> None:
    before = digest("infra.deep")
    change("infra/deeper.py", (tmp_path / "infra/deep.py").read_text())
    assert digest("infra.deeper") != before


def test_every_module_of_ours_has_a_digest() -> None:
    assert digest("flows", "tasks", "infra") != digest("tasks", "infra")


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="makes Python's own fault likely, which newer ones do not have")
def test_threads_make_digests_at_the_same_time() -> None:
    """Scoring begins in a thread while the step's own thread reads the code. A collection that runs Python code changes threads within ast.parse."""
    paths = sorted(Path(code_digest.__file__).parents[1].rglob("*.py"))[:100]
    alone = [code_digest.digest_of_file(path) for path in paths]
    code_digest.digest_of_file.cache_clear()
    before, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.callbacks.append(_takes_time)
    try:
        gc.set_threshold(20)
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(code_digest.digest_of_file, paths)) == alone
    finally:
        gc.set_threshold(*before)
        sys.setswitchinterval(interval)
        gc.callbacks.remove(_takes_time)


def _takes_time(phase: str, info: dict[str, int]) -> None:
    sum(range(300))
