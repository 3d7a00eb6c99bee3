"""Stands in for the program that plays tasksets of verifiers: two turns of a conversation, and a fault that the task names."""

import os
import signal
import time
from typing import Any

from infra.environments.runner import ModelClient
from infra.environments.tools import CallJournal

RESTARTS = {"restart": 1.0}


def play(*, row: dict[str, Any]) -> dict[str, float]:
    if row["task"] is None:
        return {"reward": 0.0} | ({} if row["repeats_tools"] else RESTARTS)
    task = row["task"]["task"]
    journal = CallJournal(row["base_url"], row["api_key"])
    journal.begin_episode()
    client = ModelClient(row["base_url"], row["api_key"], row["model"], 10.0)
    messages = [{"role": "user", "content": task["prompt"]}]
    messages.append(client.ask(messages))
    if task.get("tool"):
        call = journal.begin("ring", {}, row["repeats_tools"])
        with open(task["tool"], "a") as effects:
            effects.write("x")
        if not call["is_done"]:
            journal.finish(call["key"], "rung", False)
    if not os.path.exists(task["done"]):
        open(task["done"], "w").close()
        commit(task.get("fault"))
    client.ask([*messages, {"role": "user", "content": "again"}])
    return {"reward": 0.5, "form": 1.0, "stop reason": 1.0}


def commit(fault: str | None) -> None:
    match fault:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "hang":
            time.sleep(60)
        case "garbage":
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, b"\xff\xff\xff\xff garbage")
                except OSError:
                    continue
        case "raises":
            raise RuntimeError("the taskset's episode failed: TaskError: no")
        case "stops":
            raise SystemExit(0)
