"""Where the seconds of a step go, from one commit to the next, by what the run wrote down and by the engine's log. Used by several_gpus.py."""

import re
import time
from pathlib import Path
from typing import Any

from infra.engines.server import server_process
from infra.runs.manifest import read_manifest
from infra.store.files import read_json
from infra.store.layout import StepFolder, Workspace
from infra.telemetry.timings import measures_of
from tasks.support.rollouts.in_flight import RECOMPUTED, SWITCH_S, SWITCHED_AT

PREFILL = re.compile(
    r"(?m)^\[(?P<at>[-0-9]+ [0-9:]+)[^]]*\] Prefill batch.*?#new-token: (?P<new>\d+), #cached-token: (?P<cached>\d+)"
)
COLUMNS = (
    *("step_s", "waits_for_rollout_s", "to_training_s", "train_s", "to_commit_s"),
    *("rollout_s", "ahead_s", "older_part_s", "switch_s", "newer_part_s", "recomputed_tokens"),
    *("newer_part_prefill_tokens", "newer_part_prefill_span_s"),
)
"""The first one is the sum of the next four."""


def parts_of(run: str, before: int, step: int) -> dict[str, float]:
    """Return the parts of a step after another one of its run."""
    begin, end = (read_manifest(StepFolder.at(run, each).path).committed_at for each in (before, step))
    verbs, trainer = measures_of(run, step), read_json(StepFolder.at(run, step).train.result)
    rollout, train = verbs["roll_out"], verbs["train"]
    rolled_out, trained = rollout["began_at"] + rollout["seconds"], train["began_at"] + train["seconds"]
    found = {
        "step_s": end - begin,
        "waits_for_rollout_s": max(0.0, rolled_out - begin),
        "to_training_s": train["began_at"] - max(rolled_out, begin),
        "train_s": train["seconds"],
        "to_commit_s": end - trained,
        "rollout_s": rollout["seconds"],
        "ahead_s": max(0.0, begin - rollout["began_at"]),
        **{f"train_{phase}_s": value for phase, value in trainer["seconds"].items()},
        **{f"{verb}_s": figures["seconds"] for verb, figures in verbs.items() if verb not in ("roll_out", "train")},
    }
    return found | _parts_of_rollout(rollout)


def _parts_of_rollout(rollout: dict[str, float]) -> dict[str, float]:
    if SWITCHED_AT not in rollout:
        return {"older_part_s": rollout["last_token_at"] - rollout["first_token_at"]}
    lines = prefills(rollout[SWITCHED_AT] - rollout[SWITCH_S], rollout["last_token_at"])
    return {
        "older_part_s": rollout[SWITCHED_AT] - rollout[SWITCH_S] - rollout["first_token_at"],
        "switch_s": rollout[SWITCH_S],
        "newer_part_s": rollout["last_token_at"] - rollout[SWITCHED_AT],
        "recomputed_tokens": rollout[RECOMPUTED],
        "newer_part_prefill_tokens": float(sum(new for _, new, _ in lines)),
        "newer_part_prefill_batches": float(len(lines)),
        "newer_part_prefill_span_s": lines[-1][0] - lines[0][0] if lines else 0.0,
    }


def prefills(begin: float, end: float) -> list[tuple[float, int, int]]:
    """Return (time, computed tokens, cached tokens) of each batch of prefixes that the running engines have computed in this time. Their logs
    have whole seconds."""
    found = []
    for replica in Workspace.here().recorded_replicas():
        state = server_process.recorded(replica)
        for match in PREFILL.finditer(_text(state.log_path)) if state else ():
            at = time.mktime(time.strptime(match["at"], "%Y-%m-%d %H:%M:%S"))
            if int(begin) <= at <= end:
                found.append((at, int(match["new"]), int(match["cached"])))
    return sorted(found)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def table(rows: list[dict[str, Any]]) -> str:
    """Return a line for each step of each row, but for the first one."""
    head = ("layout", "max_staleness", "step", *COLUMNS)
    lines = [f"| {' | '.join(head)} |", f"|--|{'--:|' * (len(head) - 1)}"]
    for row in rows:
        for number, parts in enumerate(row["parts"], start=1):
            cells = [f"{parts[name]:.4g}" if name in parts else "" for name in COLUMNS]
            lines.append(f"| {row['layout']} | {row['max_staleness']} | {number} | {' | '.join(cells)} |")
    return "\n".join(lines)
