"""The program that runs a task of inspect-ai, in inspect-ai's own environment. Nothing imports it, and it imports nothing of ours.

    python -P program.py SPEC      SPEC: JSON, see infra/environments/inspect_tasks/running.py

It gets the session's key as OPENAI_API_KEY. Without base_url the task is only loaded. A task that cannot be loaded or run ends it with BAD_TASK;
the last line says why. Samples that fail are in the result with their error, and the others go on.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

BAD_TASK = 64
GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""As inspect-ai's own accuracy counts them: correct, partial, incorrect, no answer."""
WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


def number_of(value: object) -> float | None:
    """A score's value as inspect-ai's metrics take it. None for one that is no number: inspect-ai would count it as 0."""
    if isinstance(value, bool | int | float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return GRADES.get(value, WORDS.get(value.lower()))
    return None


def parts_of(scores: dict[str, Any]) -> dict[str, float | None]:
    """Values by `scorer`, or by `scorer.key` where a scorer gives several; in the task's order."""
    found: dict[str, float | None] = {}
    for name, score in scores.items():
        values = score.value if isinstance(score.value, dict) else {"": score.value}
        found |= {f"{name}.{key}" if key else name: number_of(value) for key, value in values.items()}
    return found


def turn_of(sample: Any) -> str | None:
    """The id that the gateway gave the answer which was scored; None where there was no answer."""
    if not sample.output.choices:
        return None
    wanted = sample.output.choices[0].message.id
    for event in reversed(sample.events or []):
        if event.event == "model" and event.output.choices and event.output.choices[0].message.id == wanted:
            return ((event.call and event.call.response) or {}).get("id")
    return None


def text_of(given: Any) -> str:
    if isinstance(given, str):
        return given
    return "\n".join(each if isinstance(each, str) else each.text for each in given)


def said_of(error: Any) -> str:
    """In one line; of a request that failed the end, which says why, and not the request before it."""
    return " ".join(error.message.replace("\\n", "\n").rpartition("\n\n")[2].split())


def row_of(sample: Any) -> dict[str, Any]:
    return {
        "id": sample.id,
        "epoch": sample.epoch,
        "question": text_of(sample.input),
        "answer": text_of(sample.target),
        "completion": sample.output.completion,
        "turn": turn_of(sample),
        "parts": parts_of(sample.scores or {}),
        "error": said_of(sample.error) if sample.error else None,
    }


def metrics_of(log: Any) -> dict[str, float | None]:
    """inspect-ai's own figures, by `scorer/metric`."""
    scores = log.results.scores if log.results else []
    return {f"{score.name}/{name}": number_of(metric.value) for score in scores for name, metric in score.metrics.items()}


def load(spec: dict[str, Any]) -> Any:
    """Raises SystemExit for a name that is not exactly one task."""
    from inspect_ai._eval.loader import load_tasks

    found = load_tasks([spec["task"]], {})
    if len(found) != 1:
        raise LookupError(f"{spec['task']} is {len(found)} tasks, must be one: name it as FILE@TASK or PACKAGE/TASK")
    return found[0]


def run(spec: dict[str, Any], task: Any) -> Any:
    from inspect_ai import eval as evaluate
    from inspect_ai.model import get_model

    model = get_model("openai-api/ratchet/policy", base_url=spec["base_url"], api_key=os.environ["OPENAI_API_KEY"], memoize=False)
    (log,) = evaluate(
        task,
        model=model,
        limit=spec["limit"],
        epochs=spec["epochs"],
        temperature=spec["temperature"],
        max_tokens=spec["max_tokens"],
        max_connections=spec["max_connections"],
        max_samples=spec["max_connections"],
        max_retries=0,  # the gateway's errors do not pass by themselves, and the engine's are tried again with the whole task
        fail_on_error=False,
        log_dir=spec["log_dir"],
        log_format="eval",
        log_model_api=True,
        display="plain",
        acp_server=False,
        ctl_server=False,
    )
    return log


def main() -> None:
    spec = json.loads(sys.argv[1])
    try:
        task = load(spec)
        if not spec["base_url"]:
            return
        log = run(spec, task)
        if log.status != "success":
            raise RuntimeError(log.error.message if log.error else f"inspect-ai ended with status {log.status}")
    except Exception as error:  # noqa: BLE001  # a user's task may raise anything
        print(" ".join(f"{type(error).__name__}: {error}".split()), flush=True)
        sys.exit(BAD_TASK)
    places = {str(sample_id): place for place, sample_id in enumerate(log.eval.dataset.sample_ids)}
    samples = sorted(log.samples or [], key=lambda sample: (sample.epoch, places[str(sample.id)]))
    result = {"log": log.location, "metrics": metrics_of(log), "samples": [row_of(sample) for sample in samples]}
    Path(spec["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
