"""Keep schedules as they were switched on or off in Prefect's UI. A deployment alone would reset them to prefect.yaml."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infra.services.prefect_api import api_client, asked, deployments_of

Switches = dict[tuple[str, str], tuple[bool, dict[str, Any]]]
"""Whether a schedule is active, and its parameters, by deployment id and schedule id. A new deployment keeps the id of a schedule that has a slug."""


@contextmanager
def kept(api_url: str, work_pool: str) -> Iterator[None]:
    """Restore all schedules of a work pool after the block to their state before it, with the parameters that they had, where prefect.yaml gives
    none. New ones are left as they were created."""
    before = _switches(api_url, work_pool)
    yield
    now = _switches(api_url, work_pool)
    with api_client(api_url) as client:
        for (deployment, schedule), (active, parameters) in now.items():
            was, own = before.get((deployment, schedule), (active, parameters))
            wanted = (was, parameters or own)
            if wanted != (active, parameters):
                # Both, since Prefect 3.8.8 empties the parameters of a schedule that is changed without them.
                change = {"active": wanted[0], "parameters": wanted[1]}
                asked(client, "PATCH", f"/deployments/{deployment}/schedules/{schedule}", change)


def _switches(api_url: str, work_pool: str) -> Switches:
    with api_client(api_url) as client:
        found = deployments_of(client, work_pool)
    return {
        (each["id"], schedule["id"]): (schedule["active"], schedule["parameters"] or {})
        for each in found
        for schedule in each["schedules"]
    }
