"""What is known of a task of inspect-ai without running it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.environments.inspect_tasks import running
from infra.environments.inspect_tasks.running import source_of


def test_a_change_of_a_module_that_a_task_s_file_imports_or_of_a_task_s_package_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks.py").write_text("from scorers import right\n")
    (tmp_path / "scorers.py").write_text("def right(): return 1\n")
    (tmp_path / "other.py").write_text("")
    seen = [source_of(f"{tmp_path}/tasks.py@sums")]
    (tmp_path / "scorers.py").write_text("def right(): return 2.0\n")
    seen.append(source_of(f"{tmp_path}/tasks.py@sums"))
    (tmp_path / "tasks.py").write_text("from scorers import right\nMORE = 1\n")
    seen.append(source_of(f"{tmp_path}/tasks.py@sums"))
    assert len(set(seen)) == 3
    (tmp_path / "other.py").write_text("MORE = 1\n")
    assert source_of(f"{tmp_path}/tasks.py@sums") == seen[-1]
    packages = tmp_path / "env/lib/python3.11/site-packages"
    monkeypatch.setattr(running, "settings", lambda: SimpleNamespace(inspect_python=tmp_path / "env/bin/python"))
    for version in ("1.0", "1.1"):
        (packages / f"evals-{version}.dist-info").mkdir(parents=True)
        seen.append(source_of("evals/sums"))
        (packages / f"evals-{version}.dist-info").rmdir()
    assert seen[-1] != seen[-2]
