"""The page of all fields is what `ratchet config --markdown` prints."""

import pytest

from flows.cli.app import run
from infra.config import RunConfig
from infra.config.tools.schema import fields_of
from infra.settings import CHECKOUT

PAGE = CHECKOUT / "docs/configuration.md"


def test_the_page_is_made_from_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    run(["config", "--markdown"])
    assert PAGE.read_text() == capsys.readouterr().out, "ratchet config --markdown > docs/configuration.md"


def test_every_field_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    run(["config", "--markdown"])
    text = capsys.readouterr().out
    for field in fields_of(RunConfig):
        assert text.count(f"| `{field.name}` | ") == 1
    run(["config", "trainer.loss.kl"])
    assert capsys.readouterr().out.count("trainer.loss.kl.") == 3


def test_presets_are_listed_with_their_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run(["presets", "smoke"])
    text = capsys.readouterr().out
    assert "model tiny; data arithmetic; 2 steps" in text and "    As small as shows everything" in text and "gsm8k" not in text
    run(["presets", "arithmetic-gpu"])
    assert "docs/results/learning-gpu.md" in capsys.readouterr().out, "what can be copied is in one piece"


def test_each_line_of_a_fields_help_stands_below_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run(["config", "trainer.loss"])
    names = [field.name for field in fields_of(RunConfig) if field.name.startswith("trainer.loss.")]
    assert [line for line in capsys.readouterr().out.splitlines() if not line.startswith("    ")] == names
