"""The drill's figures as a page and as JSON: docs/results/drill.md, docs/results/drill.json."""

import collections
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matrix

Outcomes = Sequence[dict[str, Any]]


def write(folder: Path, outcomes: Outcomes, seconds: float, command: str, num_known: int = 0) -> None:
    """seconds: Of this drill. num_known: Cells whose outcomes are those of an earlier one, which was cut off."""
    struck = [outcome for outcome in outcomes if outcome["target"] != "nobody"]
    content = {
        "command": command,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "seconds": round(seconds),
        "cells": len(struck),
        "passed": sum(not outcome["problems"] for outcome in struck),
        "known": num_known,
        "left_out": matrix.num_left_out(),
    }
    rows = ",\n".join(json.dumps(outcome, sort_keys=True) for outcome in outcomes)  # a line for each: they are many
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "drill.json").write_text(f'{json.dumps(content, indent=1)[:-2]},\n "outcomes": [\n{rows}\n ]\n}}\n')
    (folder / "drill.md").write_text(page(content, struck))


def machine() -> str:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{len(os.sched_getaffinity(0))} cores, {pages / 2**30:.0f} GiB, Linux {platform.release().split('-')[0]}, no GPU"


VARIANTS = {
    "Twins, a torchrun for each step": ("twins",),
    "Twins, a trainer that stays": ("resident",),
    "Twins, episodes of three turns with a tool that may not be called twice": ("episodes",),
    "Twins, episodes of three turns of a taskset of verifiers": ("tasksets",),
    "Twins, an adapter in the engine judges": ("judged",),
    "Twins, calls of tools in episodes: one that may be called once and one that may be repeated": ("tools",),
    "Twins, episodes that go on from a snapshot": ("snapshots",),
    "Twins, three steps of which two are sampled ahead": ("queue",),
    "Twins, three steps with in-flight updates": ("in flight", "in flight by time"),
    "Twins, two steps, between which episodes are carried over": ("carried",),
    "Twins, three steps, the episodes of two of them are played ahead": ("episodes ahead",),
    "Twins, two steps that are copied to an S3 server": ("store",),
    "Twins, two replicas of the engine": ("replicas",),
    "Twins, episodes on two replicas of the engine": ("episodes on replicas",),
    "Twins, a real reward model gives the rewards": ("scored",),
    "Twins, a second model judges in a server of its own": ("second judge",),
    "Twins, two nodes of a Ray cluster": ("nodes",),
    "Twins, one engine over two nodes of a Ray cluster": ("engine over nodes",),
    "Everything real (SGLang, Megatron under torchrun, Prefect's server and worker, MLflow)": ("real",),
    "Everything real, and the trainer computes with the engine's experts": ("shared experts",),
}
AT_RANDOM = "kill -9 of a random target at a random moment"
HEAD = "| {} | cells | passed | failed | median s to recover | longest |\n|--|--:|--:|--:|--:|--:|"


def page(content: dict[str, Any], struck: Outcomes) -> str:
    groups: dict[str, Outcomes] = {
        name: [outcome for outcome in struck if outcome["variant"] in variants and outcome["target"] != "any"]
        for name, variants in VARIANTS.items()
    }
    groups[AT_RANDOM] = [outcome for outcome in struck if outcome["target"] == "any"]
    groups = {name: found for name, found in groups.items() if found}
    again = sum(outcome["num_sampled_again"] for outcome in struck)
    num_full = len(matrix.TARGETS) * len(matrix.FAULTS) * len(matrix.POINTS)
    reasons = "\n".join(f"| {reason} | {count} |" for reason, count in content["left_out"].items())
    summary = "\n".join(
        [HEAD.format("steps of"), *(_row(name, found) for name, found in groups.items()), _row("**all**", struck)]
    )
    before = (
        f" {content['known']} of them passed in earlier parts of this drill, which were cut off, with the code of that time; "
        "date and minutes are those of the last part."
        if content["known"]
        else ""
    )
    parts = [
        "# The drill",
        f"{content['cells']} cells, {content['passed']} passed, {content['cells'] - content['passed']} failed.{before} {content['date']}, "
        f"{content['machine']}, {content['seconds'] / 60:.0f} minutes: `{content['command']}`.",
        "Each cell is one run of a step in which one fault (such as SIGKILL) hits one target (such as the engine) at one point (such as the "
        "middle of the rollout). If the step is not committed when the command ends, the same command is given again. The cell passes if the "
        "step is committed once; its adapter has the digest of a run without any fault (where the outcome of a tool is unknown, its episode "
        "is left out of training, and all others are as in that run); every sample is there once, the optimizer took one step, and MLflow "
        "has one run, one row and one model version; and after `--stop` no process of the cell lives and no lock is held.",
        "Seconds to recover: from the fault to the commit. *Twins* are programs that stand in for SGLang and torchrun: they have the same "
        "interfaces and compute almost nothing, so that a cell takes seconds. At the end are cells in which everything is real.",
        summary,
        f"Samples that had been delivered before the strike and were asked for again: {again} in all cells together.",
        *([f"## Failed\n\n{failures(struck)}"] if content["passed"] < content["cells"] else []),
        *(f"## {name}\n\n{counts(found)}" for name, found in groups.items()),
        f"## At how many points\n\n{matrix.table()}\n\nOf {num_full} cells ({len(matrix.TARGETS)} targets x {len(matrix.FAULTS)} faults x "
        f"{len(matrix.POINTS)} points: before, in the middle of, and at the end of each task, and the end of the step) these are left out:",
        f"<details><summary>The reasons, with their cells</summary>\n\n| why | cells |\n|--|--:|\n{reasons}\n\n</details>",
    ]
    return "\n\n".join(parts) + "\n"


def counts(outcomes: Outcomes) -> str:
    """By target, then by fault."""
    tables = [_table("target", outcomes, _target_of, matrix.TARGETS)]
    if len({outcome["fault"] for outcome in outcomes}) > 1:
        tables.append(_table("fault", outcomes, lambda outcome: str(outcome["fault"]), matrix.FAULTS))
    if any(outcome.get("calls") for outcome in outcomes):
        tables.append(calls_of_tools(outcomes))
    return "\n\n".join(tables)


def calls_of_tools(outcomes: Outcomes) -> str:
    """By tool: how often it was asked for, made, repeated and served, in all cells together."""
    totals: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for outcome in outcomes:
        for name, calls in outcome.get("calls", {}).items():
            totals[name].update(calls)
    columns = ("asked", "made", "repeated", "served")
    rows = [f"| `{name}` | {' | '.join(str(total[column]) for column in columns)} |" for name, total in totals.items()]
    return "\n".join(
        [
            "`note` may be called once, `look` may be repeated. Asked: by episodes, which ask again where they are played again. Made: "
            "times that the tool ran. Repeated: of these, with the key of an earlier one. Served: results that episodes got, of the "
            "tool or from the record.",
            "",
            f"| tool | {' | '.join(columns)} |",
            "|--|--:|--:|--:|--:|",
            *rows,
        ]
    )


def _target_of(outcome: dict[str, Any]) -> str:
    """Of a kill at random: whom it hit."""
    hit = str(outcome["struck"]).rpartition(" ")[0] if outcome["target"] == "any" else str(outcome["target"])
    return hit if hit in matrix.TARGETS else "no process: the target had ended before"


def _table(title: str, outcomes: Outcomes, name_of: Callable[[dict[str, Any]], str], order: Sequence[str]) -> str:
    groups: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for outcome in outcomes:
        groups[name_of(outcome)].append(outcome)
    names = [*(name for name in order if name in groups), *(name for name in groups if name not in order)]
    rows = [_row(name, groups[name]) for name in names] + [_row("**all**", outcomes)]
    return "\n".join([HEAD.format(title), *rows])


def _row(name: str, outcomes: Outcomes) -> str:
    failed = sum(bool(outcome["problems"]) for outcome in outcomes)
    times = [outcome["recover_s"] for outcome in outcomes if outcome["recover_s"] is not None]
    spread = f"{median(times):.1f} | {max(times):.1f}" if times else "- | -"
    return f"| {name} | {len(outcomes)} | {len(outcomes) - failed} | {failed} | {spread} |"


def failures(outcomes: Outcomes) -> str:
    return "\n".join(
        f"* `{outcome['cell']}`: {' '.join(outcome['problems'][0].split())[:300]}" for outcome in outcomes if outcome["problems"]
    )
