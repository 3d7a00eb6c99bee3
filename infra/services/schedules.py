"""Schedules that somebody switched on or off in Prefect's UI stay so: a deployment alone would set them to what prefect.yaml says."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infra.services.crash_detection import api_client, asked

Switches = dict[tuple[str, str], bool]
"""Whether a schedule is active, by the ids of its deployment and of itself, which a deployment keeps where it has a slug."""


@contextmanager
def kept(api_url: str, work_pool: str) -> Iterator[None]:
    """All schedules of a work pool are switched after the block as they were before it; new ones are as they were made."""
    before = _switches(api_url, work_pool)
    yield
    now = _switches(api_url, work_pool)
    with api_client(api_url) as client:
        for (deployment, schedule), active in now.items():
            was = before.get((deployment, schedule), active)
            if was != active:
                asked(client, "PATCH", f"/deployments/{deployment}/schedules/{schedule}", {"active": was})


def _switches(api_url: str, work_pool: str) -> Switches:
    with api_client(api_url) as client:
        found: list[dict[str, Any]] = asked(
            client, "POST", "/deployments/filter", {"work_pools": {"name": {"any_": [work_pool]}}}
        )
    return {(each["id"], schedule["id"]): schedule["active"] for each in found for schedule in each["schedules"]}
