"""How help is printed: plain text, a blank line between groups, each option with its meaning beside it or below."""

import textwrap
from typing import Any

from cyclopts.help import HelpEntry, HelpPanel
from rich.console import Console, ConsoleOptions

INDENT, COLUMN, MAX_WIDTH = 2, 30, 130
"""Letters before an option, letters before its meaning, and the longest line."""


class PlainHelp:
    """A help formatter for cyclopts."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if not panel.entries:
            return
        width = min(console.width, MAX_WIDTH)
        lines = [f"{panel.title}:", *wrapped(plain(panel.description), INDENT, width)]
        for entry in panel.entries:
            lines += entry_lines(entry, width)
        console.print("\n".join(lines), "\n", sep="", highlight=False, markup=False, soft_wrap=True)

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:  # Any: what cyclopts hands over
        text = plain(usage).removeprefix("Usage:").strip()
        console.print(f"Usage: {text}\n", highlight=False, markup=False, soft_wrap=True)

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:  # Any: as above
        text = plain(description)
        if text:
            console.print(f"{text}\n", highlight=False, markup=False, soft_wrap=True)


def plain(found: Any) -> str:  # Any: a text of rich, a part of a help page, or nothing
    if found is None:
        return ""
    if hasattr(found, "plain"):
        return str(found.plain).rstrip()
    if hasattr(found, "primary_renderable"):
        return plain(found.primary_renderable)
    return str(found).rstrip()


def entry_lines(entry: HelpEntry, width: int) -> list[str]:
    label = ", ".join(entry.display_labels)
    if entry.metavar and entry.positional_label is None:
        label = f"{label} {entry.metavar.removesuffix('...')}"
    meaning = plain(entry.description)
    if entry.choices:
        meaning = f"{meaning} [{'|'.join(map(str, entry.choices))}]".strip()
    if entry.required:
        meaning = f"{meaning} [required]".strip()
    if entry.default is not None:
        meaning = f"{meaning} [default {entry.default}]".strip()
    lines = wrapped(meaning, COLUMN, width)
    head = " " * INDENT + label
    if lines and len(head) < COLUMN - 1:
        return [head.ljust(COLUMN) + lines[0].lstrip(), *lines[1:]]
    return [head, *lines]


def wrapped(text: str, indent: int, width: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(" ".join(text.split()), width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
