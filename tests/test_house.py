"""Rules of the code base's layout that import-linter cannot check, read off the syntax trees."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from infra.settings import CHECKOUT

PACKAGES = ("flows", "tasks", "infra")
MAX_MODULES = 12
RIDDLES = re.compile(
    r"\b(whoever|whatever|nobody|anew|hangs on|by the driver's word|vouch(es|ed|ing)?|the deed|so many|last words|sung|believe[sd]?)\b",
    re.IGNORECASE,
)
"""Words that a newcomer from the field has to guess at."""


@cache
def modules() -> dict[Path, ast.Module]:
    paths = [path for package in PACKAGES for path in sorted((CHECKOUT / package).rglob("*.py"))]
    return {path.relative_to(CHECKOUT): ast.parse(path.read_bytes()) for path in paths}


def folders() -> set[Path]:
    return {path.parent for path in modules() if path.parent != Path("infra/setup/locks")}


def test_no_folder_shows_more_modules_than_one_can_take_in() -> None:
    shown: dict[str, int] = defaultdict(int)
    for path in modules():
        shown[str(path.parent)] += path.name != "__init__.py"
    assert {folder: count for folder, count in shown.items() if count > MAX_MODULES} == {}


def test_each_folder_says_in_one_sentence_what_is_in_it() -> None:
    for folder in folders():
        said = ast.get_docstring(modules()[folder / "__init__.py"]) or ""
        sentence, *rest = said.split("\n\n")
        assert re.fullmatch(r"[^.]\S*( \S+)*\.", " ".join(sentence.split())), f"{folder}/__init__.py: {said!r}"
        assert not re.search(r"[.!?] ", sentence), f"{folder}/__init__.py has more than one sentence: {said!r}"
        assert not rest or any(line.startswith("    ") for part in rest for line in part.splitlines()), f"{folder}: {rest!r}"


def test_one_public_class_name_has_one_meaning() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_no_task_imports_another_task() -> None:
    shared = ("tasks.rewards", "tasks.support")
    tasks = {
        ".".join(path.with_suffix("").parts) for path in modules() if path.parts[0] == "tasks" and path.name != "__init__.py"
    }
    tasks = {name for name in tasks if not name.startswith(shared)}
    for path, tree in modules().items():
        if path.parts[0] != "tasks":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                imported = {alias.name for alias in node.names}
            else:
                continue
            assert not imported & tasks, (
                f"{path}:{node.lineno} imports {sorted(imported & tasks)}: share it through infra or tasks/support"
            )


def test_sentences_use_plain_words() -> None:
    found = [
        f"{path}:{number} says {match[0]!r}: {line.strip()}"
        for path in modules()
        for number, line in enumerate((CHECKOUT / path).read_text().splitlines(), 1)
        for match in RIDDLES.finditer(line)
    ]
    assert not found, "\n".join(found)


OTHER_FILES_OF_THAT_NAME = {"config.json", "mlflow.json"}
"""A Hugging Face model's folder has the first; a comparison's folder, whose layout infra/comparison/paths.py knows, has both."""
IN_WORKSPACE = ("settings().workspace / '", "settings().workspace / f'", "run_folder(run) / '")


def strings_in(tree: ast.Module) -> set[tuple[int, str]]:
    """Line and value of each string literal; sentences, which name files too, are left out."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {(node.lineno, node.value) for node in found if " " not in node.value}


def test_only_the_layout_knows_names_of_files_in_the_workspace() -> None:
    layout = Path("infra/store/layout.py")
    names = {text for _, text in strings_in(modules()[layout]) if re.fullmatch(r"[\w.-]+\.[a-z]+", text)}
    names -= OTHER_FILES_OF_THAT_NAME
    assert {"manifest.json", "samples.parquet", "engine.json"} <= names
    for path, tree in modules().items():
        if path != layout:
            known = {(line, text) for line, text in strings_in(tree) if text.rpartition("/")[2] in names}
            assert not known, f"{path} names files of the workspace: take them from infra/store/layout.py: {sorted(known)}"
            paths = (node for node in ast.walk(tree) if isinstance(node, ast.BinOp))
            built = [node.lineno for node in paths if ast.unparse(node).startswith(IN_WORKSPACE)]
            assert not built, f"{path} builds paths in the workspace: take them from infra/store/layout.py: lines {built}"
