"""List the named configurations that a run can start from.

ratchet presets
ratchet presets gsm8k                                            those whose name holds this
ratchet presets && ratchet run --preset smoke --show             every value of one of them
"""

from typing import Annotated

from cyclopts import Parameter

Part = Annotated[str, Parameter(help="Part of a name.", show_default=False)]


def presets(part: Part = "", /) -> None:
    from flows.cli.terminal import console, folded
    from flows.presets import PRESETS

    found = {name: make for name, make in PRESETS.items() if part in name}
    if not found:
        raise ValueError(f"no preset has {part!r} in its name; known are {', '.join(PRESETS)}")
    for name, make in found.items():
        made = make()
        console.print(name, style="bold", markup=False)
        console.print(f"    model {made.model}; data {made.data.source}; {made.num_steps} steps", markup=False, soft_wrap=True)
        console.print(folded((make.__doc__ or "").split("\n\n")[0], 4), markup=False, soft_wrap=True)
