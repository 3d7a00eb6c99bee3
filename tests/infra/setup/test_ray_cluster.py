"""The KubeRay template: its pods held against Kubernetes' own schema, the rest against the rules of KubeRay that are named here.

KubeRay's schema (a CRD of 700 KiB) is in no package. The template was held against the one after KubeRay 1.7.0 by hand, strictly.
"""

from typing import Any

import kubernetes_validate
import pytest
import yaml

from infra.settings import CHECKOUT

PATH = CHECKOUT / "infra/setup/templates/ray-cluster.yaml"
CLUSTER: dict[str, Any] = yaml.safe_load(PATH.read_text())
SPEC = CLUSTER["spec"]
GROUPS = [SPEC["headGroupSpec"], *SPEC["workerGroupSpecs"]]
OLDEST, NEWEST = "1.30", "1.35"


def pod(group: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What KubeRay makes of a group's template, as far as we write it."""
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": group["template"]["spec"] | changes}


def variables(group: dict[str, Any]) -> dict[str, str]:
    (container,) = group["template"]["spec"]["containers"]
    return {each["name"]: each["value"] for each in container["env"]}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("number", range(len(GROUPS)))
def test_every_pod_is_one_by_kubernetes_own_schema(number: int, version: str) -> None:
    kubernetes_validate.validate(pod(GROUPS[number]), version, strict=True)


def test_that_schema_would_see_a_field_that_kubernetes_does_not_know() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod(GROUPS[0], tolerate=[]), NEWEST, strict=True)


def test_it_has_the_fields_that_kuberay_knows_and_demands() -> None:
    assert (CLUSTER["apiVersion"], CLUSTER["kind"]) == ("ray.io/v1", "RayCluster")
    assert SPEC.keys() == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert SPEC["headGroupSpec"].keys() == {"rayStartParams", "template"}
    for group in SPEC["workerGroupSpecs"]:
        assert group.keys() == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    assert all(isinstance(value, str) for group in GROUPS for value in group["rayStartParams"].values())


def test_ray_asks_for_a_token_and_is_the_version_that_is_installed() -> None:
    assert SPEC["authOptions"] == {"mode": "token"}
    assert f"ray=={SPEC['rayVersion']}\n" in (CHECKOUT / "infra/setup/locks/ray.txt").read_text()


def test_a_run_uses_the_head_and_all_workers_with_one_workspace() -> None:
    number = 1 + sum(group["replicas"] for group in SPEC["workerGroupSpecs"])
    for group in GROUPS:
        assert variables(group)["RATCHET_CLUSTER_NODES"] == str(number)
        assert variables(group)["RATCHET_WORKSPACE"] == "/workspace"
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8, "a head without GPUs could not give commands"
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/workspace"]["persistentVolumeClaim"] and mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"


def test_ray_does_not_kill_agents_for_want_of_memory() -> None:
    for group in GROUPS:
        assert variables(group)["RAY_memory_monitor_refresh_ms"] == "0"


def test_all_our_variables_are_settings_of_ours() -> None:
    from infra.settings import Settings

    ours = {name.removeprefix("RATCHET_").lower() for name in variables(GROUPS[0]) if name.startswith("RATCHET_")}
    assert ours <= Settings.model_fields.keys()


def test_kuberay_s_probes_are_replaced_since_they_need_the_dashboard_s_agent() -> None:
    for group in GROUPS:
        (container,) = group["template"]["spec"]["containers"]
        assert container["livenessProbe"]["exec"] and container["readinessProbe"]["exec"]
