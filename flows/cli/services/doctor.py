"""Look for what keeps runs from working here: Python, packages, disk, GPUs, drivers, ports, leftovers; each finding with its cure.

ratchet doctor
ratchet doctor --all                                             what is well, too
ratchet doctor && ratchet quickstart
"""

from typing import Annotated

from cyclopts import Parameter

All = Annotated[bool, Parameter(name="--all", help="Show what is well, too.", negative=())]


def doctor(*, everything: All = False) -> None:
    from flows.cli.terminal import console
    from infra.reporting.doctor import findings

    found = list(findings())
    for each in found:
        if everything or each.level != "ok":
            console.print(
                f"{each.level:8} {each.what}" + (f"\n         cure: {each.cure}" if each.cure else ""),
                markup=False,
                soft_wrap=True,
            )
    counts = {level: sum(each.level == level for each in found) for level in ("problem", "warning", "ok")}
    console.print(f"{counts['problem']} problems, {counts['warning']} warnings, {counts['ok']} checks are well")
    if counts["problem"]:
        raise SystemExit(1)
