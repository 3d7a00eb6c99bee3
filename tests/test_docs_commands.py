"""Commands in README and docs: the program `ratchet` takes each of them, and each deployment that they start is there."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import house
import pytest
import yaml

from flows.cli import program
from infra.settings import CHECKOUT

PAGES: list[Path] = house.pages()
BLOCK = re.compile(r"^ *```bash[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PLACEHOLDERS = {"STEP": "3", "K": "3"}
"""Words in capitals that stand for a number."""


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command in the blocks of a page."""
    for block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.split("&&"):
                try:
                    words = shlex.split(part, comments=True)
                except ValueError:  # a quotation over several lines, as of JSON
                    continue
                if words:
                    yield [PLACEHOLDERS.get(word, word) for word in words]


def name_of(page: Path) -> str:
    return page.relative_to(CHECKOUT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_ratchet_takes_the_commands_of_a_page(page: Path) -> None:
    app = program.program()
    for name, *words in commands(page):
        if name == "ratchet" and "--help" not in words:
            app.parse_args(program.declared(app, words), exit_on_error=False, print_error=False)


def test_deployments_that_pages_start_are_in_prefect_yaml() -> None:
    found = yaml.safe_load((CHECKOUT / "prefect.yaml").read_text())["deployments"]
    known = {f"{each['entrypoint'].rpartition('.')[2].replace('_', '-')}/{each['name']}" for each in found}
    started = {words[3] for page in PAGES for words in commands(page) if words[:3] == ["prefect", "deployment", "run"]}
    assert started and started <= known
