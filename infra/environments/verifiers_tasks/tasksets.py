"""Load a taskset in verifiers' own environment. Standard library and verifiers only: nothing else of ours is installed there.

verifiers itself would run an agent in a cloud's sandbox, and its ready harnesses fetch packages. Here each agent runs in this machine's processes,
by the taskset's own harness or by ours (infra/environments/verifiers_tasks/harness.py).

Source: verifiers 0.4.0 (github.com/PrimeIntellect-ai/verifiers), verifiers/v1/env.py, verifiers/v1/utils/loaders.py, verifiers/v1/serve/server.py.
"""

import importlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

HARNESS = "ratchet_chat"
"""Name under which verifiers finds our harness."""
LOCAL = "subprocess"
"""verifiers' runtime of this machine's own processes."""


def module_of(taskset: str) -> str:
    """Return the name under which a taskset is imported; the folder of one that is given by its path is put on Python's path."""
    path = Path(taskset)
    if not path.is_absolute():
        return taskset
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
        # tool servers are processes of their own, and import the taskset too
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path.parent), before)))
    return path.stem


@cache
def load(taskset: str, max_turns: int) -> Any:  # Any: verifiers has no types here
    """Load a taskset's environment, with its agent on this machine.

    taskset: Importable name, or the absolute path of its package or file. max_turns: Turns of the agent.

    Raises:
        ValueError: for one that cannot be imported, or cannot be run by local processes alone; in one line.
    """
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils import loaders

    sys.modules.setdefault(HARNESS, importlib.import_module("infra.environments.verifiers_tasks.harness"))
    name = module_of(taskset)
    try:
        kind = loaders.taskset_class(name)
        is_its_own = has_harness(taskset)
        seats = agent_config_fields(loaders.env_config_type(name)(taskset={"id": name}))
    except Exception as error:
        raise ValueError(f"taskset {taskset!r} cannot be loaded: {_line(error)}") from error
    if len(seats) != 1:
        raise ValueError(
            f"taskset {taskset!r} has the agents {', '.join(seats)}: one agent is supported, whose turns are trained on"
        )
    agent = {"harness": {"id": name if is_its_own else HARNESS}, "runtime": {"type": LOCAL}, "max_turns": max_turns}
    try:
        environment = vf.load_environment(vf.resolve_env_config({"taskset": {"id": name}, next(iter(seats)): agent}))
        servers = [*kind.toolsets(environment.taskset.config), *kind.task_type().toolsets(environment.taskset.config.task)]
    except Exception as error:
        raise ValueError(f"taskset {taskset!r} cannot be set up: {_line(error)}") from error
    for server in servers:
        if server.config.url or server.config.runtime.type != LOCAL:
            place = server.config.url or f"a runtime of type {server.config.runtime.type!r}"
            raise ValueError(
                f"taskset {taskset!r}: tool server {server.server_name!r} is at {place}, only local processes are supported"
            )
    return environment


def has_harness(taskset: str) -> bool:
    """Whether a taskset that is loaded is played by a harness of its own."""
    from verifiers.v1.utils import loaders

    name = module_of(taskset)
    return bool(loaders.default_harness_id(name) == name)


def task_of(environment: Any, data: dict[str, Any]) -> Any:
    """Return a task from its data, as verifiers' own server does."""
    kind = type(environment.taskset).task_type()
    return kind(kind.data_type().model_validate(data), environment.config.taskset.task)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
