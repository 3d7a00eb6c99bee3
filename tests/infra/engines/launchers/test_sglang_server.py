import sys
from pathlib import Path
from typing import Any

import pytest
from shared import load_module

PROGRAM = Path(__file__).parents[4] / "infra/engines/launchers/sglang_server.py"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["sglang_server.py"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    return load_module(PROGRAM)


@pytest.mark.parametrize(
    "argv, expected",
    [(["--device", "cpu"], True), (["--device", "cuda", "--mm-feature-transport", "cpu"], False), (["--mm-feature-transport", "cpu"], False)],
)  # fmt: skip
def test_what_stands_in_for_a_gpu_is_only_loaded_for_the_device_cpu(argv: list[str], expected: bool, program: Any) -> None:
    assert program.is_for_cpu(["sglang_server.py", *argv]) is expected


@pytest.mark.parametrize(
    ("argv", "expected"), [(["--node-rank", "1"], True), (["--node-rank", "0"], False), (["--port", "1"], False)]
)
def test_a_further_node_ends_with_its_ranks_and_starts_no_server_of_its_own(
    argv: list[str], expected: bool, program: Any
) -> None:
    assert program.is_further_node(["sglang_server.py", *argv]) is expected
    done: list[object] = []
    program.ended_with_its_ranks(lambda *, server_args: done.append(server_args), done.append)(server_args="ranks")
    assert done == ["ranks", 1]


@pytest.mark.parametrize(
    ("argv", "expected"), [([], True), (["--device", "cpu"], False), (["--enable-deterministic-inference"], False)]
)
def test_kernels_of_ours_compute_on_a_gpu_outside_deterministic_mode(argv: list[str], expected: bool, program: Any) -> None:
    assert program.has_own_kernels(["sglang_server.py", *argv]) is expected
