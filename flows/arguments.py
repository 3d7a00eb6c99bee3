"""The options of `python -m flows.run`, read off the models. Imports neither Prefect nor a model library: a typo is said at once."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from flows.presets import PRESETS, preset
from infra.config import RunConfig
from infra.config.tools.overrides import nearest, with_overrides
from infra.config.tools.schema import FieldSource, fields_of, meaning_of, origins

UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """Says of an option that does not exist which existing one is nearest."""

    def error(self, message: str) -> NoReturn:
        if message.startswith(UNKNOWN):
            option = message.removeprefix(UNKNOWN).split()[0].partition("=")[0]
            known = [spelling for action in self._actions for spelling in action.option_strings]
            self.exit(2, f"error: option {option} does not exist{nearest(option, known)}; --help lists all\n")
        self.exit(2, f"error: {message}; --help lists all options\n")


def parser() -> Parser:
    """Options read off the models, a group for each section."""
    made = Parser(
        prog="python -m flows.run",
        usage="python -m flows.run [--preset NAME] [--show] [--FIELD VALUE ...]",
        description="Make a training run, or what is left of it. A run goes on where it ended; docs/runs.md says what may change then.",
        allow_abbrev=False,
    )
    made.add_argument("--preset", default="arithmetic", choices=sorted(PRESETS), help="what to start from (default: arithmetic)")
    made.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="the same as --FIELD VALUE")
    made.add_argument("--show", action="store_true", help="print the resolved configuration with its sources, and do nothing")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in fields_of(RunConfig):
        section = field.name.rpartition(".")[0]
        if section not in groups:
            groups[section] = made.add_argument_group(section or "run", meaning_of(section))
        spellings = dict.fromkeys([f"--{field.name}", f"--{field.name.replace('_', '-')}"])
        groups[section].add_argument(
            *spellings, dest=field.name, metavar="VALUE", default=argparse.SUPPRESS, help=field.help.replace("%", "%%")
        )
    return made


def resolved(arguments: Sequence[str]) -> tuple[RunConfig, list[FieldSource], bool]:
    """The configuration, where its values come from, and whether to show it only.

    Raises:
        ValueError: for a value that does not fit.
    """
    return resolved_from(vars(parser().parse_args(arguments)))


def resolved_from(options: dict[str, Any]) -> tuple[RunConfig, list[FieldSource], bool]:
    """The same from options that are parsed already."""
    name, changes, show = options.pop("preset"), list(options.pop("set")), options.pop("show")
    base = preset(name)
    changes += [f"{field}={text}" for field, text in options.items()]
    config = with_overrides(base, changes)
    return config, origins(config, base, {change.partition("=")[0] for change in changes}), show


def checked(read: Callable[[Sequence[str]], object]) -> None:
    """End the program with one line where its arguments cannot be read."""
    try:
        read(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
