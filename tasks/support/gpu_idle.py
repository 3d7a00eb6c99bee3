"""How long the GPUs serve nobody: from the last sampled token to the first training kernel, and from the last training kernel to the first
sampled token of the next step. By what was written down while the steps ran."""

from pathlib import Path

from infra.store.files import MANIFEST, read_json, run_folder
from infra.telemetry.timings import measures_of
from tasks.open_step import BEGAN
from tasks.train import FOLDER, RESULT


def turnaround_of(run: str, step: int) -> dict[str, float]:
    """hand_over/to_training_s and hand_over/to_sampling_s; the latter is that of the step before, which ends here. Without what was done by
    an earlier attempt at the step, and without the time in which nobody had asked for it."""
    folder = _folder(run, step)
    began = float(read_json(folder / BEGAN)["at"])
    rollout = measures_of(run, step, since=began).get("roll_out", {})
    if not rollout.get("first_token_at"):  # taken over, or by an engine that is no server
        return {}
    found = {}
    if (training := _training(folder)) and training[0] > rollout["last_token_at"]:
        found["hand_over/to_training_s"] = training[0] - rollout["last_token_at"]
    before = _folder(run, step - 1)
    if step and (training := _training(before)):
        committed = before / MANIFEST
        idle = max(0.0, began - read_json(committed)["committed_at"]) if committed.exists() else 0.0
        found["hand_over/to_sampling_s"] = rollout["first_token_at"] - training[1] - idle
    return found


def _training(folder: Path) -> tuple[float, float] | None:
    """Begin and end of a step's training kernels, in seconds since the epoch."""
    path = folder / FOLDER / RESULT
    if not path.exists():
        return None
    result = read_json(path)
    begin = result.get("began_at", {}).get("train")
    return (begin, begin + result["seconds"]["train"]) if begin else None


def _folder(run: str, step: int) -> Path:
    return run_folder(run) / "steps" / f"{step:06d}"
