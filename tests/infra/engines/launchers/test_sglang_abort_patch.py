"""The mend by itself; tests/test_partial_end_to_end.py has it in the real SGLang."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from infra.engines.launchers import sglang_abort_patch


class Manager:
    """As much of SGLang's as the mend touches."""

    def __init__(self, path: str | None = "an adapter") -> None:
        self.released: list[str] = []
        self.enable_lora = True
        self.lora_registry = SimpleNamespace(release=self.release)
        self.rid_to_state: dict[str, Any] = {"one": SimpleNamespace(obj=SimpleNamespace(lora_path=path, lora_id="its id"))}

    async def release(self, name: str) -> None:
        self.released.append(name)

    def handle(self, aborted: Any) -> None:
        if not getattr(aborted, "is_health_check", False):
            self.rid_to_state.pop(aborted.rid, None)

    def handle_and_release(self, aborted: Any) -> None:
        state = self.rid_to_state.pop(aborted.rid)
        asyncio.get_running_loop().create_task(self.lora_registry.release(state.obj.lora_id))


async def released(manager: Manager, handle: Any, *aborted: Any) -> list[str]:
    handled = sglang_abort_patch.with_release(handle)
    for each in aborted:
        handled(manager, each)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return manager.released


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({}, ["its id"]),
        ({"finished_reason": {"type": "abort"}}, ["its id"]),
        ({"finished_reason": {"type": "abort", "status_code": 503}}, []),
        ({"finished_reason": {"type": "abort", "status_code": 500}}, []),
        ({"rid": "nobody's"}, []),
        ({"is_health_check": True}, []),
    ],
)
def test_a_request_that_is_broken_off_in_the_queue_gives_its_adapter_back(about: dict[str, Any], expected: list[str]) -> None:
    aborted = SimpleNamespace(**{"rid": "one", "finished_reason": None} | about)
    assert asyncio.run(released(Manager(), Manager.handle, aborted)) == expected


def test_it_is_given_back_once_and_only_where_there_is_one() -> None:
    aborted = SimpleNamespace(rid="one")
    assert asyncio.run(released(Manager(), Manager.handle, aborted, aborted)) == ["its id"]
    assert asyncio.run(released(Manager(path=None), Manager.handle, aborted)) == []
    without = Manager()
    without.enable_lora = False
    assert asyncio.run(released(without, Manager.handle, aborted)) == []


def test_a_version_that_gives_it_back_itself_is_left_alone() -> None:
    assert asyncio.run(released(Manager(), Manager.handle_and_release, SimpleNamespace(rid="one"))) == ["its id"]
