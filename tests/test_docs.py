"""README and docs: links lead somewhere, commands say which machine they need, sentences stay short, words are the field's."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import house
import pytest

from infra.settings import CHECKOUT

PAGES: list[Path] = house.pages()
ALL_PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
GENERATED = {CHECKOUT / "docs/configuration.md"}
"""Made by `ratchet config --markdown`; its text is that of the fields."""
MAX_README_WORDS, MAX_MEAN_SENTENCE = 1000, 18
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *```(\S*)[ ]*(.*?)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELL = ("bash", "console", "sh")


def name_of(page: Path) -> str:
    return page.relative_to(CHECKOUT).as_posix()


def anchors(page: Path) -> set[str]:
    """Anchors as GitHub makes them from headings, and those that are written out."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    named = re.findall(r'<a id="([^"]+)">', page.read_text())
    return {*named, *(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings)}


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if link.startswith(("http", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    assert list(broken_links(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_use_no_words_of_our_own(page: Path) -> None:
    assert house.num_riddles([page]) == 0


@pytest.mark.parametrize("page", [page for page in PAGES if page not in GENERATED], ids=name_of)
def test_sentences_are_short_on_average(page: Path) -> None:
    lengths = house.sentence_words(page)
    assert sum(lengths) / len(lengths) <= MAX_MEAN_SENTENCE


def test_the_readme_is_short() -> None:
    assert len((CHECKOUT / "README.md").read_text().split()) <= MAX_README_WORDS


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_is_in_a_block_that_says_what_it_is(page: Path) -> None:
    """A block with commands opens with a shell's name, and with `needs:` where the quickstart's machine is not enough."""
    for language, note, text in FENCE.findall(page.read_text()):
        is_command = any(
            re.match(r" *(ratchet|prefect|\./infra/|python3? |pip |sbatch |sudo )", line) for line in text.splitlines()
        )
        if is_command:
            assert language in SHELL, text
        if note:
            assert language in SHELL and re.fullmatch(r"needs: \S.*", note), note


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_of_scripts_in_commands_are_there(page: Path) -> None:
    for language, _, text in FENCE.findall(page.read_text()):
        if language in SHELL:
            named = re.findall(r"(?<![\w/.])(?:\./)?((?:infra|tests)/[\w/.-]+\w)", text)
            assert [path for path in named if not (CHECKOUT / path).exists()] == []


TROUBLE = CHECKOUT / "docs/troubleshooting.md"
VALUE = "\0"
"""Stands for a value in a message."""


def messages() -> set[str]:
    """Each text of the sources and of the set-up script, with VALUE where a value is put in."""
    found = {line for line in (CHECKOUT / "infra/quickstart").read_text().splitlines() if "echo" in line}
    for path in (path for package in ("flows", "tasks", "infra") for path in (CHECKOUT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def is_said(quoted: str, said: set[str]) -> bool:
    """Whether a message has the parts of a quoted line between its `...` in this order."""
    parts = [part for part in quoted.split("...") if part.strip()]
    pattern = re.compile(".*".join(re.escape(part) for part in parts), re.DOTALL)
    return any(pattern.search(text) for text in said)


def test_each_quoted_error_occurs_in_the_source() -> None:
    quoted = [
        line for language, _, text in FENCE.findall(TROUBLE.read_text()) if language == "text" for line in text.splitlines()
    ]
    said = messages()
    assert len(quoted) > 30
    assert [line for line in quoted if not is_said(line, said)] == []
    assert not is_said("the engine has ... gone fishing", said)


GLOSSARY = CHECKOUT / "docs/glossary.md"
OWN_WORDS = {
    anchor: row.split(", ")
    for anchor, row in re.findall(r'^\| <a id="([^"]+)"></a>([^|]+?) \|', GLOSSARY.read_text(), re.MULTILINE)
}
"""Words of ours: the rows of the glossary that have an anchor, which is the word with dashes."""
NO_PROSE = re.compile(
    r"^ *```.*?^ *```|^#+ .*?$|`[^`\n]*`|!\[[^]]*\]\([^)]*\)|\[[^]]*\]\((?![^)]*glossary\.md#)[^)]*\)|<a [^>]*>",
    re.MULTILINE | re.DOTALL,
)
"""Code, headings, pictures, and links to other places than a word of the glossary."""


def pages_of_the_readme() -> list[Path]:
    table = (CHECKOUT / "README.md").read_text().partition("## Documentation")[2].partition("\n## ")[0]
    found = [CHECKOUT / link for link in LINK.findall(table) if link.endswith(".md")]
    return [page for page in found if page not in (GLOSSARY, *GENERATED)]


def words_without_a_link(page: Path) -> Iterator[str]:
    """Words of ours whose first use on a page is no link to their row."""
    text = NO_PROSE.sub(" ", page.read_text())
    for anchor, names in OWN_WORDS.items():
        word = next(name for name in names if re.sub(r"\W+", "-", name.lower()) == anchor)
        first = re.search(rf"(?<![\w/.-]){re.escape(word)}s?(?![\w-])", text, re.IGNORECASE)
        if first and not re.match(rf"[^\][]*\]\([^)]*glossary\.md#{anchor}\)", text[first.start() :]):
            yield f"{word}: ...{' '.join(text[first.start() - 30 : first.end() + 30].split())}..."


@pytest.mark.parametrize("page", pages_of_the_readme(), ids=name_of)
def test_the_first_use_of_a_word_of_ours_links_to_the_glossary(page: Path) -> None:
    assert list(words_without_a_link(page)) == []


SPEED = CHECKOUT / "docs/results/speed.md"
ASKED = ("step_7b_s", "step_0.5b_s", "train_7b_s", "handover_30b_a3b_s", "mfu_0.5b", "trl_ratio_0.5b", "trl_ratio_7b")
"""Figures that others look up by their names."""


def test_the_table_of_speed_has_the_figures_of_its_file() -> None:
    figures = json.loads(SPEED.with_suffix(".json").read_bytes())
    assert {*ASKED} <= {each["name"] for each in figures}
    rows = [line.split("|")[1:4] for line in SPEED.read_text().split("| figure |")[1].partition("\n\n")[0].splitlines()[2:]]
    for what, before, after in rows:
        shown = [cell.strip(" *").removesuffix(" s") for cell in (before, after)]
        known = [
            [
                f"{each.get(name, 0):.{len(text.partition('.')[2])}f}"
                for text, name in zip(shown, ("before", "value"), strict=True)
            ]
            for each in figures
        ]
        assert shown in known, what
