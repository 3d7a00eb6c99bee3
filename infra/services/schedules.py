"""Keep schedules as they were switched on or off in Prefect's UI. A deployment alone would reset them to prefect.yaml."""

from collections.abc import Iterator
from contextlib import contextmanager

from infra.services.prefect_api import api_client, asked, deployments_of

Switches = dict[tuple[str, str], bool]
"""Whether a schedule is active, by deployment id and schedule id. A new deployment keeps the id of a schedule that has a slug."""


@contextmanager
def kept(api_url: str, work_pool: str) -> Iterator[None]:
    """Restore all schedules of a work pool after the block to their state before it. New ones are left as they were created."""
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
        found = deployments_of(client, work_pool)
    return {(each["id"], schedule["id"]): schedule["active"] for each in found for schedule in each["schedules"]}
