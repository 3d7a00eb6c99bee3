"""The job template for a Kubernetes work pool: rendered as Prefect's worker does it, and held against Kubernetes' own schemas.

prefect-kubernetes, which only a worker in a cluster needs, is not installed here; what its job configuration demands is in DEMANDED.
"""

import asyncio
import json
from typing import Any, cast

import jsonschema
import kubernetes_validate
import pytest
from prefect.workers.base import BaseJobConfiguration

from infra.settings import CHECKOUT

TEMPLATE: dict[str, Any] = json.loads((CHECKOUT / "infra/setup/templates/kubernetes-job-template.json").read_text())
OLDEST, NEWEST = "1.30", "1.35"
DEMANDED = {"parallelism": 1, "completions": 1, "restartPolicy": "Never"}
"""Of the pod by prefect-kubernetes 0.8.0 (its `_get_base_job_manifest`), which refuses a template without them, although the first two are the
job's: Kubernetes passes over them there."""


class KubernetesJob(BaseJobConfiguration):
    """The part of a Kubernetes worker's job configuration that comes from the template."""

    namespace: str
    annotations: dict[str, str] = {}  # noqa: RUF012  # pydantic copies it
    job_manifest: dict[str, Any]
    job_watch_timeout_seconds: int | None = None
    pod_watch_timeout_seconds: int
    stream_output: bool
    cluster_config: dict[str, Any] | None = None


def rendered(**variables: Any) -> KubernetesJob:
    """What a worker makes of a deployment's job variables; environment variables as Kubernetes wants them."""
    values = {"image": "registry/ratchet:1", **variables}
    # The client is for references to blocks and variables of a server: there are none.
    job = asyncio.run(KubernetesJob.from_template_and_values(TEMPLATE, values, client=cast(Any, object())))
    container = job.job_manifest["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": name, "value": value} for name, value in job.env.items()]
    return job


def pod_of(job: KubernetesJob) -> dict[str, Any]:
    pod = job.job_manifest["spec"]["template"]["spec"]
    assert isinstance(pod, dict)
    return pod


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"num_gpus": 4, "memory": "512Gi", "cpus": "64", "shared_memory": "64Gi", "namespace": "training"},
        {"node_selector": {"gpu": "h200"}, "service_account_name": "ratchet", "finished_job_ttl": 60, "secret": "keys"},
    ],
)
def test_a_rendered_job_is_one_by_kubernetes_own_schema(version: str, variables: dict[str, Any]) -> None:
    job = rendered(**variables)
    assert DEMANDED.items() <= pod_of(job).items()
    for field in ("parallelism", "completions"):
        del pod_of(job)[field]
    kubernetes_validate.validate(job.job_manifest, version, strict=True)


def test_that_schema_would_see_a_field_that_kubernetes_does_not_know() -> None:
    job = rendered()
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job.job_manifest, NEWEST, strict=True)


def test_nothing_of_the_template_is_left_unrendered() -> None:
    assert "{{" not in json.dumps(rendered().job_manifest)


def test_a_flow_run_gets_its_gpus_its_workspace_and_shared_memory() -> None:
    pod = pod_of(rendered(num_gpus=2, workspace_claim="mine", shared_memory="8Gi"))
    (container,) = pod["containers"]
    assert container["name"] == "prefect-job" and container["image"] == "registry/ratchet:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/workspace"]["persistentVolumeClaim"]["claimName"] == "mine"
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_the_workspace_is_the_volume_whatever_else_a_deployment_sets() -> None:
    deployment = {"PREFECT_LOGGING_EXTRA_LOGGERS": "infra,tasks", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    assert rendered(env=deployment).env == deployment | {
        "RATCHET_WORKSPACE": "/workspace",
        "HF_HOME": "/workspace/huggingface",
        "PREFECT_LOCAL_STORAGE_PATH": "/workspace/results",
    }


def test_kubernetes_does_not_run_a_flow_run_again_by_itself() -> None:
    job = rendered().job_manifest["spec"]
    assert (job["backoffLimit"], job["parallelism"], job["completions"]) == (0, 1, 1)
    assert job["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    "wrong", [{"image": None}, {"image": "x", "num_gpus": 0}, {"image": "x", "image_pull_policy": "Sometimes"}]
)
def test_wrong_job_variables_are_seen_by_the_schema_that_prefects_server_checks_them_with(wrong: dict[str, Any]) -> None:
    given = {name: value for name, value in wrong.items() if value is not None}
    jsonschema.validate({"image": "x", "num_gpus": 4}, TEMPLATE["variables"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(given, TEMPLATE["variables"])


def test_every_variable_is_used_and_every_place_has_its_variable() -> None:
    used = {part.split("}}")[0].strip() for part in json.dumps(TEMPLATE["job_configuration"]).split("{{")[1:]}
    assert used == TEMPLATE["variables"]["properties"].keys()
