"""prefect.yaml: what a server is told, and what it then does with flow runs that would overlap."""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
import yaml
from prefect import Flow
from prefect.cli.deploy._models import ConcurrencyLimitSpec, DeploymentConfig, RawScheduleConfig
from prefect.utilities.callables import get_call_parameters
from prefect.utilities.schema_tools import ValidationError, validate
from pydantic import create_model

from flows.parameters import resolved
from flows.presets import PRESETS, preset
from infra.config import RunConfig
from infra.config.tools.form import AS_JSON
from infra.services import deployments, flow_runs, prefect_api, servers
from infra.settings import CHECKOUT

DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((servers.CHECKOUT / "prefect.yaml").read_text())["deployments"]
PRESET_OF = {
    "smoke": "smoke",
    "arithmetic": "arithmetic",
    "calculator": "calculator",
    "calculator-taskset": "calculator-taskset",
    "tools": "tools",
    "digits": "digits",
    "program": "program",
    "gsm8k-1gpu": "gsm8k-qwen2.5-0.5b",
    "gsm8k-7b": "gsm8k-qwen2.5-7b",
}
FOR_BEGINNERS = ["rl-run/smoke", "rl-run/arithmetic", "rl-run/local", "evaluate/local"]
"""The first deployments, in this order."""


def flow_of(deployment: dict[str, Any]) -> Flow[..., Any]:
    module, _, name = deployment["entrypoint"].rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, Flow)
    return found


def named(deployment: dict[str, Any]) -> str:
    return f"{flow_of(deployment).name}/{deployment['name']}"


def test_the_deployments_that_the_documentation_names_are_there() -> None:
    assert sorted(map(named, DEPLOYMENTS)) == [
        "compare-engines/local",
        "evaluate/local",
        "replay-step/local",
        "rl-run/arithmetic",
        "rl-run/calculator",
        "rl-run/calculator-taskset",
        "rl-run/digits",
        "rl-run/gsm8k-1gpu",
        "rl-run/gsm8k-7b",
        "rl-run/local",
        "rl-run/program",
        "rl-run/smoke",
        "rl-run/tools",
        "rl-step/local",
        "rl-sweep/local",
    ]


def test_no_field_is_misspelt_which_prefect_would_pass_over_in_silence() -> None:
    for deployment in DEPLOYMENTS:
        assert deployment.keys() <= DeploymentConfig.model_fields.keys()
        assert deployment.get("concurrency_limit", {}).keys() <= ConcurrencyLimitSpec.model_fields.keys()
        for schedule in deployment.get("schedules", []):
            RawScheduleConfig.model_validate(schedule)


RUN_EACH = """
import importlib, json, sys
from prefect.utilities.callables import get_call_parameters
for entrypoint, parameters in json.loads(sys.argv[1]).items():
    module, _, name = entrypoint.rpartition(".")
    flow = getattr(importlib.import_module(module), name)
    try:
        flow.fn(**get_call_parameters(flow.fn, (), parameters))
    except ValueError as error:
        print(f"{entrypoint}: {error}")
"""


def test_a_wrong_variable_does_not_keep_a_flow_from_its_import_and_running_it_is_one_line() -> None:
    parameters = {each["entrypoint"]: {} for each in DEPLOYMENTS}
    parameters["flows.replay.replay_step"] = {"run": "r", "step": 0, "name": "again"}
    environment = os.environ | {"RATCHET_ENGINE_PRT": "1"}
    argv = [sys.executable, "-c", RUN_EACH, json.dumps(parameters)]
    done = subprocess.run(argv, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    message = "RATCHET_ENGINE_PRT is no setting of ours; the nearest is RATCHET_ENGINE_PORT, all are in infra/settings.py"
    assert done.stdout.splitlines() == [f"{entrypoint}: {message}" for entrypoint in parameters], done.stderr


@pytest.mark.parametrize("name", PRESET_OF)
def test_a_named_run_is_its_preset(name: str) -> None:
    (deployment,) = [each for each in DEPLOYMENTS if named(each) == f"rl-run/{name}"]
    flow = flow_of(deployment)
    given = flow.validate_parameters(get_call_parameters(flow.fn, (), deployment["parameters"]))
    assert resolved(**given) == preset(PRESET_OF[name])


def test_values_of_runs_are_written_in_the_presets_only() -> None:
    for deployment in DEPLOYMENTS:
        chosen = PRESET_OF.get(named(deployment).removeprefix("rl-run/"))
        assert deployment.get("parameters", {}) == ({"preset": chosen} if chosen else {}), named(deployment)


def test_deployments_for_beginners_come_first_and_each_says_in_a_sentence_when_to_press_it() -> None:
    assert [named(deployment) for deployment in DEPLOYMENTS][: len(FOR_BEGINNERS)] == FOR_BEGINNERS
    for deployment in DEPLOYMENTS:
        description = deployment["description"]
        assert description.startswith("Press this ") and description.endswith(".") and ". " not in description, description


def test_no_deployment_of_a_run_overlaps_itself_and_no_schedule_is_on() -> None:
    for deployment in DEPLOYMENTS:
        if flow_of(deployment).name in ("rl-run", "rl-sweep", "evaluate"):
            assert deployment["concurrency_limit"]["limit"] == 1
            assert deployment["concurrency_limit"]["collision_strategy"] == "ENQUEUE"
        for schedule in deployment.get("schedules", []):
            assert schedule["active"] is False and schedule["slug"]
    assert any(deployment.get("schedules") for deployment in DEPLOYMENTS)


KINDS = {"integer": "number"}
"""JSON types that are one to the form: it tells the parts of a union by the type that a value has in JavaScript."""


def fields_that_the_form_cannot_show(schema: dict[str, Any], place: str = "") -> list[str]:
    """Where in a flow's parameters the form would show a field that cannot be read or set, with the reason."""
    found = []
    parts = schema.get("anyOf", [])
    kinds = [KINDS.get(part.get("type"), part.get("type", part.get("$ref"))) for part in parts]
    if len(set(kinds)) < len(kinds):
        found.append(f"{place}: a union of two parts of one type, of which only the first can be chosen")
    if len({part.get("title") for part in parts}) < len([part for part in parts if "title" in part]):
        found.append(f"{place}: two parts with one title, between which the buttons cannot choose")
    if any("const" in part for part in parts):
        found.append(f"{place}: a const in a union, shown as a field that cannot be changed")
    if schema.get("type") != "boolean" and any(not choice for choice in schema.get("enum", [])):
        found.append(f"{place}: a choice that is 0, empty, false or null, which the list shows as nothing chosen")
    if schema.get("type") == "null" and "anyOf" not in place.rpartition(".")[2]:
        found.append(f"{place}: a field that nothing can be set in")
    if not schema.keys() & {"type", "anyOf", "allOf", "$ref", "enum"} and schema != AS_JSON:
        found.append(f"{place}: no type, shown as JSON to write by hand")
    nested = schema.get("properties", {}) | schema.get("definitions", {})
    nested |= {f"anyOf[{number}]": part for number, part in enumerate(parts)}
    nested |= {"items": schema["items"]} if "items" in schema else {}
    for name, part in nested.items():
        found += fields_that_the_form_cannot_show(part, f"{place}.{name}".lstrip("."))
    return found


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=named)
def test_the_form_can_show_every_field(deployment: dict[str, Any]) -> None:
    assert fields_that_the_form_cannot_show(flow_of(deployment).parameters.model_dump()) == []


@pytest.mark.parametrize(
    "annotation",
    [Literal["auto"] | Literal["a", "b"], Literal[0, 1], Literal["a", ""], int | float, Any, list[Literal["", "a"]], None],
    ids=str,
)
def test_a_field_that_the_form_cannot_show_is_found(annotation: Any) -> None:
    model = create_model("Parameters", value=(annotation, ...))
    (problem,) = fields_that_the_form_cannot_show(model.model_json_schema(ref_template="#/definitions/{model}"))[:1]
    assert problem.startswith("value")


EVERYDAY = {
    "rl-run": ["preset", "name", "num_steps", "config"],
    "rl-step": ["preset", "name", "step", "config"],
    "rl-sweep": ["preset", "name", "num_steps", "over", "config"],
    "evaluate": ["preset", "name", "adapter", "against", "config"],
    "replay-step": ["run", "step", "name", "from_task", "allow_difference", "config"],
    "compare-engines": ["name", "num_steps", "config"],
}


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=named)
def test_the_form_shows_the_everyday_parameters_with_help_and_a_closed_configuration(deployment: dict[str, Any]) -> None:
    shown = flow_of(deployment).parameters.properties
    in_order = sorted(shown, key=lambda name: shown[name]["position"])
    assert in_order == EVERYDAY[flow_of(deployment).name]
    assert all(len(field["description"]) > 10 for field in shown.values())
    assert shown["config"]["default"] is None and shown["config"]["anyOf"][0]["title"] == "unchanged"


def test_the_choices_of_a_preset_are_all_of_them() -> None:
    shown = flow_of(DEPLOYMENTS[0]).parameters.properties["preset"]
    assert (shown["type"], shown["enum"]) == ("string", ["auto", *PRESETS])
    assert "auto" not in PRESETS


@pytest.mark.parametrize("name", ["my run", "run\n", "\n", " run", "-run", "r" * 81, "a/b"])
def test_a_name_that_a_flow_would_refuse_is_refused_by_the_schema(name: str) -> None:
    for flow, parameters in (
        ("rl-step/local", {"name": name}),
        ("rl-run/smoke", {"name": name}),
        ("rl-step/local", {"config": {"name": name}}),
        ("rl-run/local", {"config": {"tracking": {"experiment": name}}}),
        ("replay-step/local", {"run": name, "step": 0, "name": "again"}),
        ("replay-step/local", {"run": "r", "step": 0, "name": name}),
    ):
        schema = flow_of(next(each for each in DEPLOYMENTS if named(each) == flow)).parameters.model_dump()
        with pytest.raises(ValidationError, match="does not match"):
            validate(parameters, schema, raise_on_error=True)
    with pytest.raises(ValueError, match="must be 1 to 80 letters, digits"):
        RunConfig(name=name)


@pytest.mark.parametrize("name", ["r", "0.5b_run-2", "r" * 80])
def test_a_name_that_a_flow_takes_passes_the_schema(name: str) -> None:
    schema = flow_of(next(each for each in DEPLOYMENTS if named(each) == "rl-run/local")).parameters.model_dump()
    validate({"config": RunConfig(name=name).model_dump(mode="json")}, schema, raise_on_error=True)
    for given in (name, ""):
        validate({"name": given, "preset": "smoke"}, schema, raise_on_error=True)


def test_an_unknown_preset_is_refused_by_the_schema_with_the_known_ones() -> None:
    schema = flow_of(DEPLOYMENTS[0]).parameters.model_dump()
    with pytest.raises(ValidationError, match=r"'arithmetik' is not one of .'auto', 'arithmetic'"):
        validate({"preset": "arithmetik"}, schema, raise_on_error=True)


@pytest.fixture(scope="module")
def server(own_prefect: str) -> Iterator[httpx.Client]:
    """Without a worker: what a worker would tell it, the tests tell it."""
    with prefect_api.api_client(own_prefect) as client:
        yield client


def asked(server: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    for pause_s in (1, 4, 16, 0):  # as Prefect's own client: its database may be busy for a moment
        answer = server.request(method, path, json=body)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            break
        time.sleep(pause_s)
    return answer.raise_for_status().json() if answer.content else None


def deployed(server: httpx.Client, name: str) -> dict[str, Any]:
    found = asked(server, "GET", f"/deployments/name/{name}")
    assert isinstance(found, dict)
    return found


def begun(server: httpx.Client, name: str, parameters: dict[str, Any]) -> str:
    body = {"parameters": parameters, "enforce_parameter_schema": True}
    return str(asked(server, "POST", f"/deployments/{deployed(server, name)['id']}/create_flow_run", body)["id"])


def told(server: httpx.Client, flow_run: str, state: str) -> tuple[str, str]:
    """The server's verdict on a state that a worker wants, and the state that the flow run has then."""
    verdict = asked(server, "POST", f"/flow_runs/{flow_run}/set_state", {"state": {"type": state}, "force": False})
    return str(verdict["status"]), str(asked(server, "GET", f"/flow_runs/{flow_run}")["state"]["name"])


@pytest.mark.end_to_end
def test_a_server_takes_every_deployment_with_its_parameters_limits_and_schedules(server: httpx.Client) -> None:
    for deployment in DEPLOYMENTS:
        found = deployed(server, named(deployment))
        assert set(found["tags"]) == set(deployment["tags"])
        limit = found["concurrency_options"] or {}
        assert limit.get("collision_strategy") == deployment.get("concurrency_limit", {}).get("collision_strategy")
        assert (found["global_concurrency_limit"] or {}).get("limit") == deployment.get("concurrency_limit", {}).get("limit")
        assert [each["active"] for each in found["schedules"]] == [False] * len(deployment.get("schedules", []))
        if flow_of(deployment).name != "replay-step":  # which has parameters that only its user knows
            begun(server, named(deployment), found["parameters"])


@pytest.mark.end_to_end
def test_a_server_takes_a_whole_configuration_and_refuses_a_wrong_value_with_its_place(server: httpx.Client) -> None:
    config = preset("gsm8k-qwen2.5-7b").model_dump(mode="json")
    for deployment in DEPLOYMENTS:
        if flow_of(deployment).name not in ("compare-engines", "replay-step"):
            begun(server, named(deployment), {"config": config})
    path = f"/deployments/{deployed(server, 'rl-run/local')['id']}/create_flow_run"
    refused = server.post(path, json={"parameters": {"config": config | {"trainer": {"learning_rate": -1}}}})
    assert refused.status_code == httpx.codes.CONFLICT
    assert "field 'config.trainer.learning_rate'. Failure reason: -1 is less than" in refused.json()["detail"]


@pytest.mark.end_to_end
def test_a_scheduled_run_whose_predecessor_is_at_work_waits_and_goes_on_after_it(server: httpx.Client) -> None:
    first, second = (begun(server, "rl-run/arithmetic", {}) for _ in range(2))
    assert told(server, first, "PENDING") == ("ACCEPT", "Pending")
    assert told(server, first, "RUNNING") == ("ACCEPT", "Running")
    assert told(server, second, "PENDING") == ("REJECT", "AwaitingConcurrencySlot")
    other = begun(server, "rl-run/smoke", {})
    assert told(server, other, "PENDING") == ("ACCEPT", "Pending"), "one deployment holds up another"
    assert told(server, first, "COMPLETED") == ("ACCEPT", "Completed")
    assert told(server, second, "PENDING") == ("ACCEPT", "Pending")


@pytest.mark.end_to_end
@pytest.mark.parametrize("end", ["CRASHED", "CANCELLED", "FAILED"])
def test_however_a_run_ends_its_successor_can_begin(server: httpx.Client, end: str) -> None:
    first, second = (begun(server, "rl-run/local", {}) for _ in range(2))
    assert told(server, first, "PENDING")[0] == "ACCEPT"
    told(server, first, "RUNNING")
    assert told(server, second, "PENDING")[0] == "REJECT"
    told(server, first, end)
    assert told(server, second, "PENDING")[0] == "ACCEPT"
    told(server, second, "CANCELLED")


@pytest.mark.end_to_end
def test_what_a_user_scheduled_in_the_ui_is_there_after_the_next_deployment(server: httpx.Client) -> None:
    run, nightly = deployed(server, "rl-run/local"), deployed(server, "rl-run/arithmetic")
    weekly = {"active": True, "schedule": {"cron": "0 5 * * 0", "timezone": "UTC"}, "parameters": {"name": "weekly"}}
    asked(server, "POST", f"/deployments/{run['id']}/schedules", [weekly])  # type: ignore[arg-type]
    changed = {"active": True, "parameters": {"name": "nightly"}}
    asked(server, "PATCH", f"/deployments/{nightly['id']}/schedules/{nightly['schedules'][0]['id']}", changed)
    asked(server, "PATCH", f"/deployments/{run['id']}", {"version": "of other sources"})
    servers.deploy(str(server.base_url).rstrip("/"))
    assert deployed(server, "rl-run/local")["version"] == deployments.sources_digest(), "nothing was deployed"
    found = deployed(server, "rl-run/local")["schedules"]
    assert [(each["schedule"]["cron"], each["parameters"]) for each in found] == [("0 5 * * 0", {"name": "weekly"})]
    found = deployed(server, "rl-run/arithmetic")["schedules"]
    assert [(each["active"], each["parameters"]) for each in found] == [(True, {"name": "nightly"})]


@pytest.mark.end_to_end
def test_a_server_that_has_the_deployments_of_these_sources_is_left_as_it_is(
    server: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    api_url = str(server.base_url).rstrip("/")
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(deployments, "_prefect", lambda _, *arguments: calls.append(arguments))
    servers.deploy(api_url)
    assert not calls
    monkeypatch.setattr(deployments, "sources_digest", lambda: "of other sources")
    servers.deploy(api_url)
    assert calls == [("--no-prompt", "deploy", "--all")]
    monkeypatch.undo()
    servers.deploy(api_url)


@pytest.mark.end_to_end
def test_a_schedule_makes_flow_runs(server: httpx.Client) -> None:
    found = asked(server, "GET", "/deployments/name/rl-run/arithmetic")
    path = f"/deployments/{found['id']}"
    asked(server, "PATCH", f"{path}/schedules/{found['schedules'][0]['id']}", {"active": True})
    asked(server, "POST", f"{path}/schedule", {"min_runs": 2})
    of_it = {"flow_runs": {"deployment_id": {"any_": [found["id"]]}, "state": {"type": {"any_": ["SCHEDULED"]}}}}
    assert len(asked(server, "POST", "/flow_runs/filter", of_it)) >= 2
    asked(server, "PATCH", f"{path}/schedules/{found['schedules'][0]['id']}", {"active": False})


@pytest.mark.end_to_end
def test_a_work_pool_that_is_paused_is_said_and_stays_paused(server: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    pool = f"/work_pools/{deployments.WORK_POOL}"
    asked(server, "PATCH", pool, {"is_paused": True})
    deployments._ensure_work_pool(server)
    assert "work pool ratchet is paused in Prefect" in caplog.text and asked(server, "GET", pool)["is_paused"]
    asked(server, "PATCH", pool, {"is_paused": False})


@pytest.mark.end_to_end
def test_a_work_pool_that_was_changed_by_hand_is_changed_back(server: httpx.Client) -> None:
    before = asked(server, "GET", f"/work_pools/{deployments.WORK_POOL}")
    any_command = {
        "job_configuration": {"command": "{{ command }}"},
        "variables": {"properties": {"command": {"type": "string"}}},
    }
    asked(server, "PATCH", f"/work_pools/{deployments.WORK_POOL}", {"concurrency_limit": 5, "base_job_template": any_command})
    servers.deploy(str(server.base_url).rstrip("/"))
    after = asked(server, "GET", f"/work_pools/{deployments.WORK_POOL}")
    assert [after[key] for key in ("concurrency_limit", "base_job_template")] == [
        before[key] for key in ("concurrency_limit", "base_job_template")
    ]
    assert after["concurrency_limit"] == 1


EVIL = "http://evil.example"


def as_a_page(server: httpx.Client, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> httpx.Response:
    """What a browser sends for a page of another origin: no password of ours, and a body without a type, which needs no preflight."""
    content = None if body is None else json.dumps(body).encode()
    return httpx.request("POST", f"{server.base_url}{path}", content=content, headers=headers, timeout=60)


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    "headers", [{"Origin": EVIL}, {"Host": "evil.example", "Origin": EVIL}, {}], ids=["origin", "host", "none"]
)
def test_a_page_of_another_origin_or_of_a_rebound_name_can_neither_read_nor_write(
    server: httpx.Client, headers: dict[str, str]
) -> None:
    deployment = deployed(server, "rl-step/local")["id"]
    requests = {
        "flows/": {"name": "evil"},
        "flow_runs/filter": {},
        f"deployments/{deployment}/create_flow_run": {"job_variables": {"command": "touch /tmp/evil"}},
    }
    answers = {path: as_a_page(server, path, body, headers) for path, body in requests.items()}
    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(requests, 401)
    assert {answer.headers.get("access-control-allow-origin") for answer in answers.values()} == {None}
    assert asked(server, "POST", "/flows/filter", {"flows": {"name": {"any_": ["evil"]}}}) == []


@pytest.mark.end_to_end
def test_only_our_own_origins_pass_the_preflight(server: httpx.Client) -> None:
    port = server.base_url.port

    def allowed(origin: str) -> str | None:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        answer = httpx.options(f"{server.base_url}flow_runs/filter", headers=headers)
        found = answer.headers.get("access-control-allow-origin")
        return str(found) if found else None

    ours = [f"http://127.0.0.1:{port}", f"http://localhost:{port}"]
    assert [allowed(origin) for origin in ours] == ours
    others = [EVIL, "null", f"http://127.0.0.1:{port + 1}", f"https://127.0.0.1:{port}"]
    assert [allowed(origin) for origin in others] == [None] * len(others)


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    "variables",
    [{"command": "touch /tmp/evil"}, {"working_dir": "/tmp"}, {"env": {"PYTHONSTARTUP": "/tmp/evil.py"}}, {"image": "evil"}],
    ids=lambda variables: next(iter(variables)),
)
def test_job_variables_that_no_flow_needs_are_refused_even_with_the_password(
    server: httpx.Client, variables: dict[str, Any]
) -> None:
    path = f"/deployments/{deployed(server, 'rl-step/local')['id']}/create_flow_run"
    answer = server.post(path, json={"parameters": {}, "job_variables": variables})
    assert answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY, answer.text
    assert "Additional properties are not allowed" in answer.text


@pytest.mark.end_to_end
def test_what_a_dead_process_left_running_is_closed_by_the_next_start(server: httpx.Client) -> None:
    api_url = str(server.base_url).rstrip("/")
    dead, given_up, alive, unknown = (flow_run_of(server) for _ in range(4))
    child, left = flow_run_of(server, parent=dead), flow_run_of(server, parent=given_up)
    for flow_run in (dead, child, given_up, left, alive, unknown):
        told(server, flow_run, "RUNNING")
    told(server, given_up, "CRASHED")  # as the automation for silent flow runs does, which knows no children
    ended = subprocess.Popen(["sleep", "60"])
    for flow_run in (dead, given_up):
        flow_runs.note(flow_run, api_url, ended.pid)
    flow_runs.note(alive, api_url, os.getpid())
    ended.kill()
    ended.wait()
    assert servers.ensure_prefect() == api_url
    states = {each: asked(server, "GET", f"/flow_runs/{each}")["state"]["name"] for each in (dead, child, left, alive, unknown)}
    assert states == dict.fromkeys((dead, child, left), "Crashed") | {alive: "Running", unknown: "Running"}
    assert [path.stem for path in flow_runs.folder().glob("*.json")] == [alive]
    for flow_run in (alive, unknown):
        told(server, flow_run, "COMPLETED")


def flow_run_of(server: httpx.Client, parent: str | None = None) -> str:
    """The id of a flow run, which another one started where parent is given."""
    body: dict[str, Any] = {"flow_id": asked(server, "POST", "/flows/", {"name": "by hand"})["id"]}
    if parent:
        task_run = {"flow_run_id": parent, "task_key": "sub", "dynamic_key": "0"}
        body["parent_task_run_id"] = asked(server, "POST", "/task_runs/", task_run)["id"]
    return str(asked(server, "POST", "/flow_runs/", body)["id"])
