"""GPU idle time: from the last sampled token to the first training kernel, and from the last training kernel to the first
sampled token of the next step. Computed from what was recorded while the steps ran."""

from infra.store.files import read_json
from infra.store.layout import StepFolder
from infra.telemetry.timings import measures_of, summed_draws


def gpu_idle_of(run: str, step: int) -> dict[str, float]:
    """Return gpu_idle/to_training_s and gpu_idle/to_sampling_s. The latter starts in the previous step and ends in this one. Excludes work of
    earlier attempts at the step, and the time before the step was started."""
    folder = StepFolder.at(run, step)
    began = float(read_json(folder.began)["at"])
    rollout = summed_draws(measures_of(run, step, since=began)).get("roll_out", {})
    if not rollout.get("last_token_at"):  # reused samples, or an engine that is not a server
        return {}
    found = {}
    if (training := _training(folder)) and training[0] > rollout["last_token_at"]:
        found["gpu_idle/to_training_s"] = training[0] - rollout["last_token_at"]
    before = StepFolder.at(run, step - 1)
    # Of the turns of episodes only their ends are known.
    if step and rollout.get("first_token_at") and (training := _training(before)):
        committed = before.manifest
        idle = max(0.0, began - read_json(committed)["committed_at"]) if committed.exists() else 0.0
        found["gpu_idle/to_sampling_s"] = rollout["first_token_at"] - training[1] - idle
    return found


def _training(folder: StepFolder) -> tuple[float, float] | None:
    """Return start and end of a step's training kernels, in seconds since the epoch."""
    path = folder.train.result
    if not path.exists():
        return None
    result = read_json(path)
    begin = result.get("began_at", {}).get("train")
    return (begin, begin + result["seconds"]["train"]) if begin else None
