"""torch's compiler stays out of the trainer's start, and works where it is called all the same."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from infra.megatron.model.lazy_compile import compiled_at_first_call

COMPILER = "torch._inductor.compile_fx"
PROGRAM = f"""
import sys
from pathlib import Path
from infra.megatron.__main__ import run
code = run(Path(sys.argv[1]), None)
print("{COMPILER}" in sys.modules)
sys.exit(code)
"""


def test_a_job_is_done_without_loading_the_compiler(new_job: Callable[..., Any], child_environment: dict[str, str]) -> None:
    made = new_job()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(made.path)], env=child_environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
    assert made.result.num_optimizer_steps == 1


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Names and options of what was compiled."""
    made: list[tuple[str, dict[str, Any]]] = []

    def compile_now(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        made.append((function.__name__, options))
        return function

    monkeypatch.setattr(torch, "compile", compile_now)
    return made


def test_what_is_decorated_in_the_block_is_compiled_once_when_it_is_called(compiled: list[Any]) -> None:
    usual = torch.compile
    with compiled_at_first_call():

        @torch.compile
        def plain(x: int) -> int:
            """Adds one."""
            return x + 1

        @torch.compile(dynamic=True)
        def with_options(x: int, *, y: int) -> int:
            return x * y

    assert torch.compile is usual
    assert compiled == [] and plain.__doc__ == "Adds one."
    assert [plain(1), plain(2), with_options(2, y=3)] == [2, 3, 6]
    assert compiled == [("plain", {}), ("with_options", {"dynamic": True})]


def test_torch_has_its_own_back_when_an_import_fails(compiled: list[Any]) -> None:
    usual = torch.compile
    with pytest.raises(ImportError), compiled_at_first_call():
        raise ImportError
    assert torch.compile is usual
