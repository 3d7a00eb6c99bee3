"""The program that lists a taskset's tasks as rows of a data set, in verifiers' own environment.

    python listing.py TASKSET NUM FILE      writes at most NUM rows as JSON lines: question, answer, task (its whole data)

A taskset that cannot be listed ends it with BAD_TASKSET; the last line says why.
"""

import json
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[3]
BAD_TASKSET = 64
Row = dict[str, Any]


def row_of(data: Any) -> Row:
    """The prompt as the model will see it, without tools; the field `answer` where the taskset's tasks have one."""
    answer = getattr(data, "answer", "")
    content: Row = data.model_dump(mode="json")
    prompt = content["prompt"] if content["prompt"] is not None else content["name"] or f"task {content['idx']}"
    system = [{"role": "system", "content": content["system_prompt"]}] if content["system_prompt"] else []
    said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    question = [*system, *({"role": each["role"], "content": each["content"]} for each in said)]
    return {
        "question": question if len(question) > 1 else question[0]["content"],
        "answer": answer if isinstance(answer, str | int | float | bool) else json.dumps(answer),
        "task": content,
    }


def main() -> None:
    taskset, num, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    sys.path.insert(0, str(CHECKOUT))
    from infra.environments.verifiers_tasks import tasksets

    try:
        tasks = tasksets.load(taskset, 1).taskset.take(num)
        lines = [json.dumps(row_of(task.data)) for task in tasks]
    except Exception as error:  # noqa: BLE001  # a user's taskset may raise anything
        print(" ".join(f"{type(error).__name__}: {error}".split()), flush=True)
        sys.exit(BAD_TASKSET)
    file.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
