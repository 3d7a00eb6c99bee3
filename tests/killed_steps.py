"""Steps in processes of their own that are killed while their samples are judged, and replayed: what their tests share."""

import sqlite3
from contextlib import closing
from pathlib import Path

from shared import program_with

from infra.config import RunConfig
from infra.store.files import read_json, read_json_lines
from infra.store.samples import read_samples


def finished(config: RunConfig, workspace: Path, program: str, *replayed_from: str) -> None:
    """Make the step without a kill, then replay it."""
    made = program_with(config, workspace, program, "0", *replayed_from)
    assert made.wait(timeout=900) == 0, (workspace / "said.log").read_text()[-4000:]


def digests(step: Path) -> dict[str, str]:
    manifest = read_json(step / "manifest.json")
    files = {name: manifest[name]["file"] for name in ("prompts", "rollouts", "scored", "batch")}
    return {name: file["sha256"] for name, file in {**files, "adapter": manifest["adapter_out"]["weights"]}.items()}


def paid(workspace: Path) -> list[str]:
    """The request of each payment for an answer that can be read. Others are asked for again, as any unjudged sample is."""
    readable = "SELECT key FROM payments JOIN answers USING (key) WHERE text GLOB '*[0-9]*'"
    with closing(sqlite3.connect(workspace / "judgements.sqlite")) as ledger:
        return [key for (key,) in ledger.execute(readable)]


def check_judged(workspace: Path, *replays: str) -> Path:
    """Every sample was judged, each answer was paid once, and the replays have the step's digests. Return the step's folder."""
    step = workspace / "runs/r/steps/000000"
    samples = read_samples(step / "scored.parquet")
    assert len({each.reward for each in samples}) > 2
    shown = {(row["prompt_id"], index) for row in read_json_lines(step / "judgements.jsonl") for index in row["sample_indices"]}
    assert shown == {(each.prompt_id, each.sample_index) for each in samples}
    for replay in replays:
        assert digests(workspace / f"runs/{replay}/steps/000000") == digests(step)
    assert len(paid(workspace)) == len({*paid(workspace)}), "by a replay"
    return step
