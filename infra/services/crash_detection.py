"""Detection of crashed flow runs by Prefect's server: a flow run whose process died does not stay Running or Pending forever.

A worker reports the death of a flow run's process, unless it died too. Then only a missing heartbeat shows it. A running flow run of ours
sends a heartbeat every 30 s, the shortest interval that Prefect allows (prefect.yaml sets it for each deployment). A pending one starts
within a minute.
"""

from collections.abc import Sequence
from typing import Any

from infra.services.prefect_api import api_client, asked, deployments_of

SILENCE_S = 90.0
START_S = 300.0
"""Longest time from Pending to Running. A flow run's process takes 10 to 30 s, longer on a busy machine."""
ENDED = ("Completed", "Failed", "Crashed", "Cancelled")
WAITING = ("Suspended", "Paused", "Scheduled", "AwaitingRetry", "Resuming")
"""States, besides the final ones, in which a flow run has no process to send a heartbeat."""


def automations(work_pool: str, deployment_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return the automations in the form that Prefect's API expects."""
    beat, quiet = "prefect.flow-run.heartbeat", [f"prefect.flow-run.{state}" for state in (*ENDED, *WAITING)]
    return [
        _crashed_after(
            f"{work_pool}: flow runs that fell silent",
            after=beat,
            expect=[beat, *quiet],
            within_s=SILENCE_S,
            message=f"No heartbeat for {SILENCE_S:g} s: the flow run's process and its worker are gone. Run the same again.",
            deployment_ids=deployment_ids,
        ),
        _crashed_after(
            f"{work_pool}: flow runs that never started",
            after="prefect.flow-run.Pending",
            expect=["prefect.flow-run.Running", "prefect.flow-run.Cancelling", *quiet],
            within_s=START_S,
            message=f"Pending for {START_S:g} s: the worker that took the flow run is gone. Run the same again.",
            deployment_ids=deployment_ids,
        ),
    ]


def _crashed_after(
    name: str, *, after: str, expect: list[str], within_s: float, message: str, deployment_ids: Sequence[str]
) -> dict[str, Any]:
    return {
        "name": name,
        "description": "Set up by Ratchet; changed back whenever it deploys.",
        "enabled": True,
        "trigger": {
            "type": "event",
            "posture": "Proactive",
            "after": [after],
            "expect": expect,
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            # Other flow runs on the same server may have another heartbeat interval.
            "match_related": {
                "prefect.resource.role": "deployment",
                "prefect.resource.id": [f"prefect.deployment.{deployment}" for deployment in deployment_ids],
            },
            "for_each": ["prefect.resource.id"],
            "threshold": 1,
            "within": within_s,
        },
        "actions": [{"type": "change-flow-run-state", "state": "CRASHED", "name": "Crashed", "message": message}],
    }


def ensure(api_url: str, work_pool: str) -> None:
    """Have Prefect's server watch all deployments of a work pool. Existing automations are updated."""
    with api_client(api_url) as client:
        deployments = deployments_of(client, work_pool)
        for automation in automations(work_pool, sorted(deployment["id"] for deployment in deployments)):
            known = asked(client, "POST", "/automations/filter", {"automations": {"name": {"any_": [automation["name"]]}}})
            if known:
                asked(client, "PUT", f"/automations/{known[0]['id']}", automation)
            else:
                asked(client, "POST", "/automations/", automation)
