"""Our work pool and the deployments of prefect.yaml on a Prefect server, made where they are missing or of other sources.

`prefect deploy` takes seconds, since it imports every flow. So each deployment carries the digest of what it was made from as its version,
and a server whose deployments all have the digest of this checkout is left as it is.
"""

import hashlib
import json
import logging
import os
import subprocess

import httpx
import yaml

from infra.processes import children
from infra.services import prefect_password, schedules
from infra.services.prefect_api import api_client, asked, deployments_of
from infra.settings import CHECKOUT, main_python

log = logging.getLogger(__name__)

WORK_POOL = "ratchet"
PREFECT_YAML = CHECKOUT / "prefect.yaml"
JOB_TEMPLATE = CHECKOUT / "infra/setup/templates/process-job-template.json"
"""It accepts no job variables that would make a worker run another command, or run it elsewhere."""
SOURCES = ("flows", "infra/config")
"""Folders that a deployment's parameters, defaults and descriptions come from."""


def ensure(api_url: str) -> None:
    """Create the work pool, which runs one flow run at a time, and deploy all of prefect.yaml, unless that is done. Schedules stay as they are."""
    with api_client(api_url) as client:
        _ensure_work_pool(client)
        version = sources_digest()
        deployed = [deployment["version"] for deployment in deployments_of(client, WORK_POOL)]
        if deployed.count(version) == num_described():
            return
        with schedules.kept(api_url, WORK_POOL):
            _prefect(api_url, "--no-prompt", "deploy", "--all")
        for deployment in deployments_of(client, WORK_POOL):
            asked(client, "PATCH", f"/deployments/{deployment['id']}", {"version": version})


def sources_digest() -> str:
    """Return the SHA-256 over the checkout's place, prefect.yaml, and the sources of all flows and of their parameters."""
    sources = [path for folder in SOURCES for path in (CHECKOUT / folder).rglob("*.py")]
    digest = hashlib.sha256(str(CHECKOUT).encode())
    for path in [PREFECT_YAML, *sorted(sources)]:
        digest.update(f"\n{path.relative_to(CHECKOUT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def num_described() -> int:
    """Return the number of deployments that prefect.yaml describes."""
    return len(yaml.safe_load(PREFECT_YAML.read_text())["deployments"])


def _ensure_work_pool(client: httpx.Client) -> None:
    wanted = {"base_job_template": json.loads(JOB_TEMPLATE.read_text()), "concurrency_limit": 1}
    if found := asked(client, "POST", "/work_pools/filter", {"work_pools": {"name": {"any_": [WORK_POOL]}}}):
        if found[0]["is_paused"]:
            log.warning(
                "work pool %s is paused in Prefect: flow runs wait until it is resumed, by its page or `prefect work-pool resume %s`",
                *(WORK_POOL, WORK_POOL),
            )
        asked(client, "PATCH", f"/work_pools/{WORK_POOL}", wanted)
    else:
        asked(client, "POST", "/work_pools/", {"name": WORK_POOL, "type": "process", **wanted})


def _prefect(api_url: str, *arguments: str) -> None:
    command = [str(main_python()), "-m", "prefect", *arguments]
    done = subprocess.run(
        command,
        cwd=CHECKOUT,
        env={**os.environ, **prefect_password.client_environment(api_url)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise children.ProgramFailed(
            f"prefect {' '.join(arguments)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}", done.returncode
        )
