"""Measure how easy the code base is to enter: sizes of folders, functions and files, types, words of our own, length of sentences.

    python tests/benches/house.py

Prints one row a figure. Nothing is started and nothing but files of the checkout is read.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median, quantiles

CHECKOUT = Path(__file__).parents[2]
SOURCES = ("flows", "tasks", "infra")
LONG_FILE = 350
BROAD = {"Exception", "BaseException"}
RIDDLES = (
    "whoever",
    "whatever",
    "nobody",
    "anew",
    "hangs on",
    "by the driver's word",
    r"vouch(?:ed|es|ing)?",
    "the deed",
    "so many",
    "last words",
    "sung",
    r"believe[sd]?",
)
"""Words that a reader from the field would have to translate."""
HISTORY = ("docs/history/", "docs/results/")
"""Pages of the past; their words stay as they were written."""
PROSE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\[])")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (CHECKOUT / folder).rglob("*.py"))


def pages() -> list[Path]:
    found = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
    return [path for path in found if not path.relative_to(CHECKOUT).as_posix().startswith(HISTORY)]


def num_lines(paths: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def functions(paths: list[Path]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def typed_share(paths: list[Path]) -> float:
    """Share of parameters (self and cls apart) and results that have a type."""
    has_type = []
    for node in functions(paths):
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        has_type += [each.annotation is not None for each in parameters if each.arg not in ("self", "cls")]
        has_type.append(node.returns is not None)
    return mean(has_type)


def num_broad_excepts(paths: list[Path]) -> int:
    handlers = (node for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler))
    return sum(1 for each in handlers if each.type is None or (isinstance(each.type, ast.Name) and each.type.id in BROAD))


def largest_folder(paths: list[Path]) -> tuple[int, str]:
    folders = [path.parent for path in paths if path.name != "__init__.py"]
    return max((folders.count(folder), folder.relative_to(CHECKOUT).as_posix()) for folder in set(folders))


def num_riddles(paths: list[Path]) -> int:
    pattern = re.compile(rf"\b(?:{'|'.join(RIDDLES)})\b", re.IGNORECASE)
    return sum(len(pattern.findall(path.read_text())) for path in paths)


def sentence_words(page: Path) -> list[int]:
    """Words of each sentence; code blocks, tables and headings are none."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    lines = ["" if line.lstrip().startswith(("|", "#", "!")) else line for line in text.splitlines()]
    paragraphs = re.split(r"\n\s*\n|\n\s*(?:[*-]|\d+\.)\s", "\n".join(lines))
    return [len(sentence.split()) for each in paragraphs for sentence in PROSE_END.split(each.strip()) if sentence.strip()]


def figures() -> dict[str, str]:
    code, tests = sources(*SOURCES), sources("tests")
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions(code)]
    count, folder = largest_folder(code)
    long_files = [path for path in code if path.read_text().count("\n") > LONG_FILE]
    return {
        "modules in the largest folder": f"{count} ({folder})",
        "lines of a function: median, 90%, longest": f"{median(lengths):g} / {quantiles(lengths, n=10)[-1]:.0f} / {max(lengths)}",
        f"files over {LONG_FILE} lines": str(len(long_files)),
        "typed parameters and results": f"{100 * typed_share(code):.1f}%",
        "broad excepts, in a thousand lines": f"{1000 * num_broad_excepts(code) / num_lines(code):.2f}",
        "lines of tests : lines of source": f"{num_lines(tests) / num_lines(code):.2f}",
        "riddle words in code": str(num_riddles(code)),
        "riddle words in README and docs": str(num_riddles(pages())),
        "words of a sentence, mean over README and docs": f"{mean(n for page in pages() for n in sentence_words(page)):.1f}",
        "words of README": str(len((CHECKOUT / "README.md").read_text().split())),
    }


def main() -> None:
    print("| figure | value |\n|--|--:|")
    for name, value in figures().items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
