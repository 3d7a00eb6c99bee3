import importlib.util
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[4] / "infra/engines/launchers/sglang_server.py"


@pytest.mark.parametrize(
    "argv, expected",
    [(["--device", "cpu"], True), (["--device", "cuda", "--mm-feature-transport", "cpu"], False), (["--mm-feature-transport", "cpu"], False)],
)  # fmt: skip
def test_what_stands_in_for_a_gpu_is_only_loaded_for_the_device_cpu(
    argv: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["sglang_server.py"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("sglang_server", PROGRAM)
    assert spec and spec.loader
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert program.is_for_cpu(["sglang_server.py", *argv]) is expected
