"""`ratchet down --purge`: what it removes, and what it refuses."""

import os
from pathlib import Path

import pytest

from flows.cli.app import run
from infra import settings as settings_module
from infra.processes.gpu_lock import gpu_lock
from infra.store.files import open_workspace


@pytest.fixture
def checkout(tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with an environment and a link to one; its workspace is this test's."""
    folder, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    for environment in (folder / ".venv", elsewhere):
        environment.mkdir(parents=True)
        (environment / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (folder / ".venv-sglang").symlink_to(elsewhere)
    (folder / "README.md").write_text("")
    monkeypatch.setattr(settings_module, "CHECKOUT", folder)
    monkeypatch.setenv("RATCHET_WORKSPACE", str(tmp_path / "workspace"))
    settings_module.settings.cache_clear()
    return folder


def test_workspace_and_environments_go_and_nothing_else(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = open_workspace()
    run(["down", "--purge", "--yes"])
    assert not workspace.exists() and not (checkout / ".venv").exists()
    assert (checkout / "README.md").exists() and (checkout / ".venv-sglang").is_symlink()
    assert (checkout.parent / "elsewhere/pyvenv.cfg").exists()
    assert str(workspace) in capsys.readouterr().out


def test_without_a_terminal_and_without_yes_nothing_is_removed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = open_workspace()
    with pytest.raises(SystemExit):
        run(["down", "--purge"])
    assert "needs an answer" in capsys.readouterr().err and workspace.exists() and (checkout / ".venv").exists()


def test_a_folder_that_is_no_workspace_is_kept(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = open_workspace()
    os.unlink(workspace / "workspace.json")
    with pytest.raises(SystemExit):
        run(["down", "--purge", "--yes"])
    assert "holds no workspace of Ratchet" in capsys.readouterr().err and workspace.exists()


def test_nothing_is_removed_while_a_run_is_at_work(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = open_workspace()
    with gpu_lock("run mine"), pytest.raises(SystemExit):
        run(["down", "--purge", "--yes"])
    assert "run mine is at work" in capsys.readouterr().err and workspace.exists()
