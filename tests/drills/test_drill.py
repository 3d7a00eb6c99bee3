"""A sample of the drill: every part of a step is struck once or twice, and the step heals. The long form is `drill.py` without arguments."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from shared import FIRST_PORT, load_module

from infra.settings import CHECKOUT

HERE = Path(__file__).parent

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(1600)]


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(HERE))  # as for a program of this folder
    try:
        return load_module(HERE / f"{name}.py")
    finally:
        sys.path.remove(str(HERE))


matrix, tool_cells, drill_report = load("matrix"), load("tool_cells"), load("drill_report")
SAMPLE = [str(cell) for cell in matrix.SAMPLE]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return drilled(tmp_path_factory.mktemp("drill"), "--sample", timeout_s=1500)


def drilled(folder: Path, *chosen: str, timeout_s: float) -> dict[str, dict[str, Any]]:
    """The outcomes of some cells."""
    command = [
        sys.executable,
        str(HERE / "drill.py"),
        *chosen,
        "--folder",
        str(folder / "cells"),
        "--port",
        str(FIRST_PORT + 1300),
    ]
    done = subprocess.run(
        [*command, "--json", str(folder / "outcomes.json")],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert (folder / "outcomes.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    print(done.stdout)
    return {outcome["cell"]: outcome for outcome in json.loads((folder / "outcomes.json").read_text())["outcomes"]}


@pytest.mark.parametrize("cell", SAMPLE)
def test_a_step_heals(outcomes: dict[str, dict[str, Any]], cell: str) -> None:
    assert outcomes[cell]["problems"] == []


@pytest.mark.full
@pytest.mark.timeout(3700)
@pytest.mark.parametrize(
    "family",
    ["/queue", "/in flight", "/store", "/replicas", "/carried", "/episodes ahead", "/nodes", "/engine over nodes"],
)
def test_a_run_whose_far_parts_fail_heals(family: str, tmp_path: Path) -> None:
    outcomes = drilled(tmp_path, "--only", family, timeout_s=3600)
    assert {cell: outcome["problems"] for cell, outcome in outcomes.items() if outcome["problems"]} == {}
    if skipped := [outcome["struck"] for outcome in outcomes.values() if outcome["struck"].startswith("skipped: ")]:
        print("\n".join(skipped))


def test_a_word_that_no_address_has_is_refused_and_not_taken_for_all_cells() -> None:
    command = [sys.executable, str(HERE / "drill.py"), "--only", "no such word"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no cell that can be run here has 'no such word' in its address")


def test_the_drill_strikes_every_task_of_the_step() -> None:
    from prefect import Task

    import flows.drawing
    import flows.step

    called = {name for module in (flows.drawing, flows.step) for name, each in vars(module).items() if isinstance(each, Task)}
    assert called - {"gather_draws", "ask_engine", "ask_judge"} == set(matrix.TASKS)


def test_every_pair_of_target_and_fault_is_struck_or_left_out_for_a_reason() -> None:
    assert sum(matrix.num_left_out().values()) > 0
    for target in matrix.TARGETS:
        for fault in matrix.FAULTS:
            everywhere = set(matrix.MEANT.get((target, fault), ())) >= set(matrix.POINTS)
            assert everywhere or matrix.LEFT_OUT[target, fault]


def test_every_cell_has_an_address() -> None:
    for cell in (*matrix.matrix(), *matrix.REAL, *matrix.SAMPLE, *matrix.random_cells(2)):
        assert matrix.cell_of(str(cell)).point == cell.point
    assert set(matrix.SAMPLE) <= set(matrix.matrix())


def lines(folder: Path, **words: str) -> Path:
    for name, content in words.items():
        (folder / f"{name}.txt").write_text("".join(f"{word}\n" for word in content.split()))
    return folder


def test_calls_of_tools_are_counted_by_their_keys(tmp_path: Path) -> None:
    folder = lines(tmp_path, asked="note look note look", served="note look look", noted="k1 k2", looked="k3 k4 k3")
    assert {name: tuple(calls) for name, calls in tool_cells.calls_of(folder).items()} == {
        "note": (2, 2, 0, 1),
        "look": (2, 3, 1, 2),
    }


def test_an_effect_made_twice_fails_its_cell_whatever_the_sum(tmp_path: Path) -> None:
    calls = tool_cells.calls_of(lines(tmp_path, asked="note note", noted="k1 k1", looked="k3 k3"))
    assert tool_cells.repetitions(calls, num_looks=1) == ["1 calls of note were made twice, not 0"]
    assert tool_cells.repetitions(calls, num_looks=0)[1:] == ["1 calls of look were made twice, not 0"]


def test_the_page_sums_the_calls_of_all_cells() -> None:
    row = {"asked": 50, "made": 48, "repeated": 0, "served": 49}
    struck = {"target": "flow", "fault": "SIGKILL", "problems": [], "recover_s": 1.0, "struck": "flow SIGKILL"}
    page = drill_report.counts([struck | {"calls": {"note": row}}, struck | {"calls": {"note": row}}, struck])
    assert "| `note` | 100 | 96 | 0 | 98 |" in page
    assert "asked" not in drill_report.counts([struck])
