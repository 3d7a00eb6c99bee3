"""`python -m flows.compare_engines`: a comparison in this process, by options that are read off its model."""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from flows import interrupts
from flows.command_line import with_prefect
from flows.compare_engines import compare_engines
from infra.comparison.config import ComparisonConfig
from infra.config.tools.overrides import changed
from infra.config.tools.schema import fields_of
from infra.processes.children import ProgramFailed
from infra.services import servers
from tasks.comparisons.begin_comparison import check_comparison

console = Console(highlight=False)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m flows.compare_engines",
        description="Compare rollout engines under the same RL loop. An interrupted comparison goes on where it stopped.",
        allow_abbrev=False,
    )
    for field in fields_of(ComparisonConfig):
        spellings = dict.fromkeys([f"--{field.name.replace('_', '-')}", f"--{field.name}"])
        meaning = field.help.replace("%", "%%")
        if field.type == "bool":
            made.add_argument(*spellings, dest=field.name, nargs="?", const="true", default=argparse.SUPPRESS, help=meaning)
        else:
            several = "+" if field.name == "backends" else None
            made.add_argument(
                *spellings, dest=field.name, nargs=several, metavar="VALUE", default=argparse.SUPPRESS, help=meaning
            )
    return made


def resolved(arguments: Sequence[str]) -> ComparisonConfig:
    """Raises ValueError for a value that does not fit."""
    options = vars(parser().parse_args(arguments))
    if "backends" in options:
        options["backends"] = " ".join(options["backends"])
    return changed(ComparisonConfig(), [f"{field}={text}" for field, text in options.items()])


def main() -> None:
    try:
        config = resolved(sys.argv[1:])
        servers.given_prefect()
        check_comparison(config)
        with with_prefect():
            output = compare_engines(config)
        console.print(f"report   {output}/benchmark_report.txt")
    except (ValueError, ProgramFailed) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    interrupts.run(main)
