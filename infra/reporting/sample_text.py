"""Samples on pages: questions and answers as they stand, in code blocks, so that no letter of them is read as Markdown or HTML."""

import re
import textwrap
from collections.abc import Sequence

from infra.eval_records import Evaluation
from infra.store.files import path_of, read_json_lines
from infra.store.layout import EvaluationFolder
from infra.store.samples import WHOLE_REWARD, episodes_of, read_samples

MARKUP = re.compile(r"[\\`*_\[\]<>|~#&!]")
MAX_LETTERS, WIDTH = 800, 100
"""Letters and line width of a question or an answer. Prefect's pages do not wrap lines in code blocks."""
WRAPPER = textwrap.TextWrapper(WIDTH, drop_whitespace=False, expand_tabs=False, replace_whitespace=False)
MAX_QUESTIONS = 3
"""Questions that are followed over a run's evaluations."""


def cell(words: str) -> str:
    """Text in one line of Markdown, such as a cell of a table, with its signs shown as they are."""
    return MARKUP.sub(r"\\\g<0>", " ".join(words.split()))


def block(text: str) -> str:
    """Return a code block with the text. Its fence is longer than any row of backticks in the text."""
    short = text if len(text) <= MAX_LETTERS else f"{text[:MAX_LETTERS]} ..."
    lines = [part for line in short.split("\n") for part in WRAPPER.wrap(_printable(line)) or [""]]
    longest = max(map(len, re.findall("`+", short)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}text", *lines, fence])


def _printable(line: str) -> str:
    """Signs that a page or a store cannot take, such as NUL or an escape sequence, as Python writes them."""
    return "".join(sign if sign.isprintable() or sign == "\t" else sign.encode("unicode_escape").decode() for sign in line)


def samples_section(rows: Sequence[dict[str, object]]) -> str:
    """A part for each sample: its reward with the named parts, its advantage, the question and the answer, or all its turns."""
    made = []
    for row in rows:
        if isinstance(row["reward"], float) and isinstance(row["advantage"], float):
            parts = parts if isinstance(parts := row.get("parts"), dict) and set(parts) != {WHOLE_REWARD} else {}
            shown = "".join(f", {cell(name)} {value:.3g}" for name, value in sorted(parts.items()))
            head = f"**Reward {row['reward']:.3g}**{shown}, advantage {row['advantage']:+.3g}"
            judge = ["Its judge:", block(str(row["judge"]))] if row.get("judge") else []
            made.append("\n\n".join([head, block(str(row["prompt"])), *_answer(row), *judge]))
    return "\n\n".join(made)


def _answer(row: dict[str, object]) -> list[str]:
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        return [block(str(row["completion"]))]
    return [part for heading, text in turns for part in (f"{heading}:", block(text))]


def same_questions_section(evaluations: Sequence[Evaluation]) -> str:
    """A part for each of the first held-out questions: its greedy answer in each evaluation, by adapter version."""
    answers: dict[str, list[str]] = {}
    for made in evaluations:
        folder = EvaluationFolder(path_of(made.file).parent)
        if not (folder.greedy.exists() and folder.questions.exists()):
            continue
        asked = {row["prompt_id"]: row["question"] for row in read_json_lines(folder.questions)[:MAX_QUESTIONS]}
        for episode in episodes_of(read_samples(folder.greedy)):
            if (sample := episode[0]).prompt_id in asked:
                text = "\n".join(each.text for each in episode)
                reward = f"reward {sample.reward:.3g}" if sample.reward is not None else f"unjudged ({sample.unjudged})"
                head = f"adapter {made.step}, {reward}"
                answers.setdefault(asked[sample.prompt_id], []).append(f"{head}\n\n{block(text)}")
    return "\n\n".join("\n\n".join([f"**Question**\n\n{block(question)}", *given]) for question, given in answers.items())
