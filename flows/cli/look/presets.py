"""List the named configurations that a run can start from.

ratchet presets
ratchet presets gsm8k                                            those whose name holds this
ratchet presets && ratchet run --preset smoke --show             every value of one of them
"""

from typing import Annotated

from cyclopts import Parameter

Part = Annotated[str, Parameter(help="Part of a name.", show_default=False)]


def presets(part: Part = "", /) -> None:
    from rich.table import Table

    from flows.cli.terminal import console
    from flows.presets import PRESETS

    table = Table()
    for column in ("preset", "model", "data", "steps", "about"):
        table.add_column(column, overflow="fold", justify="right" if column == "steps" else "left")
    for name, make in PRESETS.items():
        if part in name:
            made = make()
            about = " ".join((make.__doc__ or "").split("\n\n")[0].split())
            table.add_row(name, made.model, made.data.source, str(made.num_steps), about)
    if not table.row_count:
        raise ValueError(f"no preset has {part!r} in its name; known are {', '.join(PRESETS)}")
    console.print(table)
