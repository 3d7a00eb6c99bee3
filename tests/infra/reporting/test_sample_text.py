"""A sample is shown letter for letter: a Markdown parser finds no markup in it."""

import pytest
from markdown_it import MarkdownIt

from infra.reporting.sample_text import MAX_LETTERS, WIDTH, block, cell, samples_section

NASTY = [
    "Answer:\n#### 42",
    "# heading\n## another\n---\n* list\n1. one\n> quote",
    "a | b\n|--|--|\n| c | d |",
    "<script>alert(1)</script><img src=x onerror=y>&amp;&#35;",
    "`one` ``two`` ```\nthree\n``` ````four\n`````",
    "~~~\nfence\n~~~",
    "![p](http://x) [l](http://y) <http://z> https://example.com",
    "**bold** _it_ ~~gone~~ \\* $x^2$",
    "    indented\n\ttab\n\n\n\nafter empty lines",
    "",
]


def code_blocks(markdown: str) -> list[str]:
    """The contents of the code blocks, if there is nothing but code blocks, bold text and paragraphs."""
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(markdown)
    assert {token.type for token in tokens} <= {"fence", "paragraph_open", "inline", "paragraph_close"}
    return [token.content.removesuffix("\n") for token in tokens if token.type == "fence"]


@pytest.mark.parametrize("text", NASTY)
def test_an_answer_is_shown_letter_for_letter(text: str) -> None:
    assert code_blocks(block(text)) == [text]
    section = samples_section([{"reward": 1.0, "advantage": 0.5, "prompt": text, "completion": text}] * 2)
    assert code_blocks(section) == [text] * 4
    turns = [("turn 1, 3 tokens", text), ("given, 2 tokens", text)]
    assert (
        code_blocks(samples_section([{"reward": 1.0, "advantage": 0.5, "prompt": text, "completion": "", "turns": turns}]))
        == [text] * 3
    )


@pytest.mark.parametrize("text", ["\x00\x1b[31mred", "\u202eback", "\ud800", "a\r\nb"])
def test_signs_that_a_page_or_a_store_cannot_take_are_written_out(text: str) -> None:
    (shown,) = code_blocks(block(text))
    assert shown == text.encode("unicode_escape").decode().replace("\\n", "\n") and shown.encode()


def test_long_text_is_cut_and_wrapped() -> None:
    (shown,) = code_blocks(block("d" * 5000))
    assert shown.replace("\n", "").rstrip(" .") == "d" * MAX_LETTERS and max(map(len, shown.splitlines())) <= WIDTH


def test_a_name_in_a_table_is_one_line_without_markup() -> None:
    text = cell("a | b\n\n# `c` <img src=x> ![p](http://x)")
    assert "\n" not in text
    (token,) = [token for token in MarkdownIt("gfm-like", {"linkify": False}).parse(text) if token.type == "inline"]
    assert {child.type for child in token.children or []} <= {"text", "text_special"}
    assert "".join(child.content for child in token.children or []) == "a | b # `c` <img src=x> ![p](http://x)"
