"""Tasksets of verifiers in a configuration: what plays an episode, whose tasks it plays, and how a set names it."""

from pathlib import Path
from typing import Any

import pytest

from flows.cli.fields import from_here
from infra.config import PlayedEnvironment, RunConfig
from infra.data.forms import tasksets
from infra.settings import settings
from tasks.support import preflight

OWN = {"environment": {"id": "my_taskset"}, "data": {"source": "verifiers:my_taskset"}}


def config(**fields: Any) -> RunConfig:
    return RunConfig.model_validate(OWN | fields)


def test_a_taskset_plays_the_episodes() -> None:
    played = config().played
    assert played is not None and (played.id, played.label) == ("my_taskset", "my_taskset")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"id": "a", "name": "b.c"}, r"environment.name 'b.c' with environment.id 'a': leave one of them out"),
        ({"id": "a", "command": ["b"]}, r"environment.command \['b'\] with environment.id 'a': leave one of them out"),
        ({"kind": "verifiers"}, r"environment.kind 'verifiers' needs environment.id"),
        ({"kind": "verifiers", "name": "b.c"}, r"environment.kind 'verifiers' needs environment.id, not environment.name 'b.c'"),
        ({"kind": "python", "id": "a"}, r"environment.kind 'python' needs environment.name, not environment.id 'a'"),
        ({"id": "a b"}, r"taskset 'a b' is neither the name of an installed one, such as my_taskset, nor a path"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(environment: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(environment=environment)


def test_a_taskset_plays_its_own_tasks() -> None:
    with pytest.raises(
        ValueError,
        match=r"data.source 'arithmetic' with environment.id 'my_taskset': .* set data.source to 'verifiers:my_taskset'",
    ):
        config(data={})


def test_a_source_has_a_tasksets_name() -> None:
    with pytest.raises(ValueError, match="taskset '' is neither the name of an installed one"):
        config(data={"source": "verifiers:"})


def test_an_evaluation_set_may_be_a_taskset_and_asks_its_tasks() -> None:
    asked = RunConfig.model_validate({"evaluation": {"sets": ["other?environment=verifiers:other_taskset&num_prompts=7"]}})
    found = asked.eval_configs["other"]
    assert found.environment is not None and found.environment.id == "other_taskset"
    assert (found.data.source, found.data.num_prompts) == ("verifiers:other_taskset", 7)


def test_a_set_of_a_run_with_a_taskset_asks_held_out_tasks() -> None:
    found = config(evaluation={"sets": ["own"]}).eval_configs["own"]
    assert found.environment is not None and found.environment.id == "my_taskset"
    assert (found.data.source, found.data.part) == ("verifiers:my_taskset", "held_out")


def test_a_set_without_an_environment_has_none_in_a_run_with_a_taskset() -> None:
    sets = [{"name": "sums", "environment": "", "reward": "gsm8k_numeric", "data": {"source": "arithmetic"}}]
    assert config(evaluation={"sets": sets}).eval_configs["sums"].environment is None


def test_a_path_is_absolute_from_where_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_here("environment.id", "mine/sums") == str(tmp_path / "mine/sums")
    assert from_here("environment.id", "my_taskset") == "my_taskset"
    assert from_here("data.source", "verifiers:mine/sums") == f"verifiers:{tmp_path}/mine/sums"
    assert from_here("evaluation.sets", "a?environment=verifiers:mine/sums").endswith(
        "verifiers%3A" + str(tmp_path / "mine/sums").replace("/", "%2F")
    )


def test_a_path_without_a_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} is no Python package"):
        tasksets.check(str(tmp_path))
    (tmp_path / "__init__.py").touch()
    tasksets.check(str(tmp_path))


def test_a_run_with_a_taskset_that_is_not_there_is_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="taskset '/nowhere/mine': /nowhere/mine is no Python package"):
        preflight._check_environment(PlayedEnvironment(id="/nowhere/mine", max_failed_frac=0.0))


def test_an_environment_whose_name_is_no_place_of_code_is_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"^environment 'Game' is no environment: give a file and its class or function such as"):
        preflight._check_environment(PlayedEnvironment(name="Game", max_failed_frac=0.0))
    with pytest.raises(ValueError, match=r"^environment file /nowhere/mine\.py does not exist"):
        preflight._check_environment(PlayedEnvironment(name="/nowhere/mine.py:Game", max_failed_frac=0.0))


def test_without_verifiers_the_command_that_makes_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_VERIFIERS_PYTHON", str(tmp_path / "bin/python"))
    settings.cache_clear()
    with pytest.raises(
        ValueError, match=r"has no verifiers: `python3 infra/setup/bootstrap.py --verifiers` makes its environment"
    ):
        tasksets.interpreter()
    settings.cache_clear()


def test_a_changed_file_of_a_taskset_changes_its_digest(tmp_path: Path) -> None:
    for name in ("__init__.py", "tools.py"):
        (tmp_path / name).write_text("1")
    before = tasksets.source_digest(str(tmp_path))
    (tmp_path / "tools.py").write_text("2")
    assert tasksets.source_digest(str(tmp_path)) != before
