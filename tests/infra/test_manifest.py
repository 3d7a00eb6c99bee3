from infra import sources
from infra.manifest import Environment, differences, environment


def other(**changes: object) -> Environment:
    return environment().model_copy(update=changes)


def test_the_environment_of_one_machine_is_the_same_each_time_and_names_all_that_counts() -> None:
    now = environment()
    assert now == environment()
    assert {"main.txt", "main-cuda.txt", "sglang-cpu.txt", "sglang-cuda.txt"} <= now.locks.keys()
    assert {"python", "torch", "megatron-core", "prefect", "mlflow"} <= now.versions.keys()
    assert now.machine.keys() == {"device", "processor", "num_cpu_threads"}
    assert now.machine["processor"]
    assert differences(now, now) == ()


def test_all_of_our_sources_are_named_one_by_one() -> None:
    now = environment()
    assert {"tasks/train.py", "infra/megatron/loss.py", "flows/step.py"} <= now.sources.keys()
    assert now.code == sources.digest("flows", "tasks", "infra")


def test_what_differs_is_named() -> None:
    now = environment()
    before = other(
        sources={name: digest for name, digest in now.sources.items() if name != "tasks/score.py"} | {"tasks/train.py": "0"},
        locks=now.locks | {"main.txt": "0"},
        versions=now.versions | {"torch": "1.0"},
        machine=now.machine | {"num_cpu_threads": "999"},
    )
    assert differences(before, now) == (
        "sources: tasks/score.py, tasks/train.py",
        "locks: main.txt",
        f"versions: torch 1.0 -> {now.versions['torch']}",
        f"machine: num_cpu_threads 999 -> {now.machine['num_cpu_threads']}",
    )
