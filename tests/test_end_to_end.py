"""Two whole steps of one run with the real parts: SGLang, Megatron under torchrun, Prefect's server and worker, MLflow.

The first step is made by quickstart, the second by hand with Prefect's own command, with two trainer processes that split the
model between them.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from safetensors import safe_open
from shared import FIRST_PORT, RATCHET

from infra.config import RunConfig
from infra.models import base_model
from infra.processes import children
from infra.processes.children import ProcessRef
from infra.settings import CHECKOUT, DEFAULT_WORKSPACE, settings

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(1800)]

RUN = "e2e"
PLANTED = "planted-5f0c"
"""Part of every secret that the whole test runs with."""
SECRETS = {
    "HF_TOKEN": f"hf_{PLANTED}",
    "MLFLOW_TRACKING_USERNAME": "e2e",
    "MLFLOW_TRACKING_PASSWORD": f"mlflow-{PLANTED}",
    "RATCHET_PREFECT_AUTH": f"e2e:{PLANTED}",
    "PREFECT_API_AUTH_STRING": f"e2e:{PLANTED}",
}


class Finished(NamedTuple):
    workspace: Path
    first_output: str
    second_output: str
    api_url: str
    mlflow_url: str
    command_lines: set[str]
    """Of all processes that were seen while the steps were made."""

    def prefect(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = httpx.request(method, f"{self.api_url}/{path}", json=body, auth=("e2e", PLANTED))
        return answer.raise_for_status().json()

    def step(self, index: int) -> Path:
        return self.workspace / "runs" / RUN / "steps" / f"{index:06d}"

    def read(self, index: int, name: str) -> Any:
        return json.loads((self.step(index) / name).read_text())


def command(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        arguments,
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


OF_THE_STEP_BEFORE = ("gpu_idle/to_sampling_s", "memory/trainer_after_release_gib", "memory/trainer_inference_gib")
"""Metrics of what the step before has left, a trainer that sleeps for example; the first step has none."""


@contextlib.contextmanager
def process_list() -> Iterator[set[str]]:
    """What `ps` shows while the block runs, looked at several times a second."""
    seen: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.2):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A workspace of its own on ports of its own, with the tiny model in it; everything that was started is ended."""
    workspace = tmp_path_factory.mktemp("e2e") / "workspace"
    settings.cache_clear()
    tiny = base_model.locate("tiny")  # made in the checkout's own workspace, where later test runs find it
    assert tiny.is_relative_to(DEFAULT_WORKSPACE)
    shutil.copytree(tiny, workspace / "models" / "tiny")
    ours = {
        "RATCHET_WORKSPACE": str(workspace),
        "RATCHET_PREFECT_PORT": str(FIRST_PORT),
        "RATCHET_MLFLOW_PORT": str(FIRST_PORT + 200),
        "RATCHET_ENGINE_PORT": str(FIRST_PORT + 400),
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    environment |= ours | SECRETS
    yield environment
    command(environment, *RATCHET, "quickstart", "--stop")


@pytest.fixture(scope="module")
def finished(environment: dict[str, str]) -> Finished:
    small = [
        "--data.num_prompts=8",
        "--sampling.max_output_tokens=40",
        "--trainer.num_minibatches=1",
        "--tracking.register_every=1",
    ]
    with process_list() as seen:
        first = command(environment, *RATCHET, "quickstart", "--run", RUN, *small)
        workspace, api_url, mlflow_url, second = _second_step(environment)
    command(environment, *RATCHET, "upload")  # what the steps left to a process of its own is in the store when this returns
    return Finished(workspace, first, second, api_url, mlflow_url, seen)


def _second_step(environment: dict[str, str]) -> tuple[Path, str, str, str]:
    workspace = Path(environment["RATCHET_WORKSPACE"])
    api_url, mlflow_url = (
        json.loads((workspace / "services" / f"{name}.json").read_text())["url"] for name in ("prefect", "mlflow")
    )
    config = RunConfig.model_validate_json((workspace / "runs" / RUN / "config.json").read_text())
    split = config.but(trainer=config.trainer.but(num_processes=2, tensor_parallel=2))
    by_hand = environment | {"PREFECT_API_URL": api_url}
    parameters = json.dumps({"config": split.model_dump(mode="json")})
    second = command(
        by_hand, sys.executable, "-m", "prefect", "deployment", "run", "rl-step/local", "--params", parameters, "--watch"
    )
    return workspace, api_url, mlflow_url, second


def test_quickstart_shows_progress_a_table_and_both_pages(finished: Finished) -> None:
    for expected in ("step 0/2  reward ", "GPU idle", "time of the step", "SHA-256", finished.mlflow_url):
        assert expected in finished.first_output
    assert finished.api_url.removesuffix("/api") in finished.first_output


def test_the_second_step_goes_on_from_the_first(finished: Finished) -> None:
    first, second = finished.read(0, "manifest.json"), finished.read(1, "manifest.json")
    assert (first["adapter_in"]["version"], first["adapter_out"]["version"], second["adapter_out"]["version"]) == (0, 1, 2)
    assert second["adapter_in"] == first["adapter_out"]
    assert second["rollouts"]["adapter_sha256"] == first["adapter_out"]["weights"]["sha256"]
    assert first["prompts"]["file"]["sha256"] != second["prompts"]["file"]["sha256"]


def test_adam_goes_on_where_it_was(finished: Finished) -> None:
    for moment in ("exp_avg", "exp_avg_sq"):
        with safe_open(finished.workspace / "runs" / RUN / f"adapters/000002/state/{moment}.safetensors", "np") as state:
            assert json.dumps(state.metadata()).count('"2"') == 1
            assert all(state.get_tensor(name).any() for name in state.keys() if "lora_B" in name)  # noqa: SIM118


def test_the_engine_stays_awake_between_steps(finished: Finished) -> None:
    assert json.loads((finished.workspace / "engine-launches.json").read_text()) == 1
    assert finished.read(1, "report.json")["metrics"]["time/wake_s"] < 5


def test_engine_and_trainer_agree_on_every_sampled_token(finished: Finished) -> None:
    for step in (0, 1):
        metrics = finished.read(step, "report.json")["metrics"]
        assert 0 < metrics["mismatch/mean_abs_logprob_diff"] < 1e-3
        assert metrics["train/grad_norm"] > 0


def test_a_cpu_releases_nothing_and_says_so(finished: Finished) -> None:
    assert finished.read(0, "manifest.json")["colocation"]["colocation"] == "keep_weights"
    assert finished.read(0, "report.json")["metrics"]["memory/released_gib"] == 0


def test_hugging_face_and_peft_give_the_trainers_log_probabilities(finished: Finished) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = finished.workspace / "runs" / RUN / "adapters/000002"
    canary = json.loads((folder / "state/canary.json").read_text())
    tokens = torch.tensor([canary["tokens"]])
    model = AutoModelForCausalLM.from_pretrained(finished.workspace / "models/tiny", dtype=torch.float32)

    def logprobs() -> Any:
        with torch.no_grad():
            scores = model(tokens).logits[0, :-1].log_softmax(-1)
        return scores.gather(-1, tokens[0, 1:, None]).squeeze(-1)

    base = logprobs()
    model = PeftModel.from_pretrained(model, folder)
    adapted = logprobs()
    assert (base - torch.tensor(canary["base_logprobs"])).abs().max() < 1e-4
    assert (adapted - torch.tensor(canary["adapter_logprobs"])).abs().max() < 1e-4
    assert (adapted - base).abs().max() > 1e-3


def test_mlflow_has_each_step_once_with_its_lineage(finished: Finished) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(finished.mlflow_url, finished.mlflow_url)
    memory = json.loads((finished.workspace / "runs" / RUN / "mlflow.json").read_text())
    run = client.get_run(memory["run_id"])
    for name, value in finished.read(1, "report.json")["metrics"].items():
        history = client.get_metric_history(run.info.run_id, name)
        first = 1 if name in OF_THE_STEP_BEFORE else 0
        assert [row.step for row in history] == list(range(first, 2))
        assert history[-1].value == pytest.approx(value)
    assert run.data.params["trainer.lora.rank"] == "8"
    assert run.data.tags["ratchet.algorithm"] == "grpo + ppo" and "ratchet.lock.main" in run.data.tags
    assert run.inputs.dataset_inputs[0].dataset.name == "arithmetic"
    assert {file.path for file in client.list_artifacts(run.info.run_id, "adapters/000002")} == {
        "adapters/000002/adapter_config.json",
        "adapters/000002/adapter_model.safetensors",
    }
    versions = client.search_model_versions(f"name = '{RUN}'")
    assert {version.tags["ratchet.adapter"] for version in versions} == {"1", "2"}
    assert client.get_model_version_by_alias(RUN, "best").version in {version.version for version in versions}


def test_prefect_has_the_reports_and_the_lines_of_the_tasks(finished: Finished) -> None:
    def found(what: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = finished.prefect("POST", f"{what}/filter", body)
        assert isinstance(answer, list)
        return answer

    artifacts = {artifact["key"]: artifact["type"] for artifact in found("artifacts", {}) if artifact["key"]}
    assert artifacts.pop("e2e-000000") == "markdown"
    assert artifacts.pop("e2e-000001") == "markdown"
    # Progress is told of work that lasts over 10 s; the start of the engine does, or nearly.
    report = json.loads((finished.workspace / "runs/e2e/steps/000000/report.json").read_text())
    start_s = report["metrics"]["engine/start_s"]
    may_be = dict.fromkeys(("e2e-starting-sglang", "e2e-rollout", "e2e-training"), "progress")
    assert artifacts.items() <= may_be.items()
    assert "e2e-starting-sglang" in artifacts or start_s < 11
    messages = "\n".join(
        line["message"] for page in range(0, 1000, 200) for line in found("logs", {"limit": 200, "offset": page})
    )
    assert "step 0/2  reward " in messages and "the engine is awake" in messages
    assert "\nsglang: " not in messages and "micro-batch" not in messages, "they are in the log files"


def test_the_form_in_the_ui_shows_every_section_with_its_help(finished: Finished) -> None:
    deployment = finished.prefect("GET", "deployments/name/rl-step/local")
    schema = deployment["parameter_openapi_schema"]
    (sections,) = (each["properties"] for each in schema["properties"]["config"]["anyOf"] if "properties" in each)
    assert set(RunConfig.model_fields) == {*sections, "name", "num_steps"}
    (data,) = (each["properties"] for each in sections["data"]["anyOf"] if "properties" in each)
    assert "prompt" in data["num_prompts"]["description"].lower()


def test_no_secret_and_no_key_is_in_a_file_or_in_the_process_list(finished: Finished) -> None:
    key = (finished.workspace / "engine.key").read_text()
    assert len(key) > 30
    files = [path for path in finished.workspace.rglob("*") if path.is_file()]
    assert {"sglang-0001.log", "worker.log", "prefect.db", "mlflow.db", "trainer.log"} <= {path.name for path in files}
    for secret in (PLANTED, key):
        assert [path for path in files if secret.encode() in path.read_bytes()] == (
            [] if secret == PLANTED else [finished.workspace / "engine.key"]
        )
        assert secret not in finished.first_output + finished.second_output
        assert not [line for line in finished.command_lines if secret in line]
    assert any("infra.megatron" in line for line in finished.command_lines)
    assert any("sglang_server.py" in line for line in finished.command_lines)


def test_the_engine_refuses_who_has_no_key(finished: Finished) -> None:
    url = json.loads((finished.workspace / "engine.json").read_text())["url"]
    headers = {"Authorization": f"Bearer {(finished.workspace / 'engine.key').read_text()}"}
    for method, path in (("GET", "/model_info"), ("POST", "/generate"), ("POST", "/load_lora_adapter"), ("GET", "/server_info")):
        assert httpx.request(method, url + path).status_code == 401
    info = httpx.get(f"{url}/server_info", headers=headers)
    assert info.status_code == 200
    assert info.json()["api_key"] is None


def test_prefect_refuses_who_has_no_password(finished: Finished) -> None:
    assert httpx.post(f"{finished.api_url}/flow_runs/filter", json={}).status_code == 401


def test_cached_results_are_json(finished: Finished) -> None:
    contents = [json.loads(path.read_text()) for path in (finished.workspace / "results").rglob("*") if path.is_file()]
    # a task's result says how it was written; a flow's is the bare content
    assert {content["metadata"]["serializer"]["type"] for content in contents if "metadata" in content} == {"json"}


def test_a_wrong_field_is_refused_before_a_run_is_made(finished: Finished, environment: dict[str, str]) -> None:
    parameters = json.dumps({"config": {"trainer": {"learning_rat": 1}}})
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "deployment", "run", "rl-step/local", "--params", parameters],
        cwd=CHECKOUT,
        env=environment | {"PREFECT_API_URL": finished.api_url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "learning_rat" in re.sub(r"\s+", "", done.stdout + done.stderr)


@pytest.mark.parametrize("from_task", ["roll_out", pytest.param("train", marks=pytest.mark.full)])
def test_a_replayed_step_has_the_digests_that_it_had(from_task: str, finished: Finished, environment: dict[str, str]) -> None:
    name = f"again-{from_task}"
    parameters = json.dumps({"run": RUN, "step": 1, "name": name, "from_task": from_task})
    by_hand = environment | {"PREFECT_API_URL": finished.api_url}
    command(by_hand, sys.executable, "-m", "prefect", "deployment", "run", "replay-step/local", "--params", parameters, "--watch")
    replayed = json.loads((finished.workspace / "runs" / name / "steps/000001/replay.json").read_text())
    assert replayed["differences"] == []
    different = [row["product"] for row in replayed["digests"] if not row["equal"]]
    assert not different
    assert {"samples", "adapter out"} <= {row["product"] for row in replayed["digests"]}


FROM_PYTHON = """
from flows.presets import smoke

base = smoke()
config = base.but(name="from-python", data=base.data.but(num_prompts=4))
"""


@pytest.mark.parametrize(
    ("notebook", "parameters", "num_figures"),
    [
        ("compare_runs", 'EXPERIMENT, RUNS, TAGS, MAX_VARIANTS = "ratchet", [], {"ratchet.model": "tiny"}, 8', 2),
        ("inspect_step", f"RUN, STEP = {RUN!r}, 1", 2),
        ("quickstart", FROM_PYTHON, 0),
    ],
)
def test_a_notebook_runs_on_what_these_steps_have_left(
    finished: Finished, environment: dict[str, str], tmp_path: Path, notebook: str, parameters: str, num_figures: int
) -> None:
    path = CHECKOUT / f"notebooks/{notebook}.ipynb"
    command(environment, sys.executable, "-m", "tests.execute_notebook", str(path), str(tmp_path), parameters)
    figures = sorted(tmp_path.glob("*.png"))
    assert len(figures) == num_figures and all(figure.stat().st_size > 5000 for figure in figures)
    if notebook == "quickstart":
        for run in ("from-python", "from-python-twice"):
            assert (finished.workspace / "runs" / run / "steps/000000/manifest.json").exists()


def test_stop_ends_what_was_started_and_only_that(finished: Finished, environment: dict[str, str]) -> None:
    names = ("prefect", "mlflow", "worker")
    services = [json.loads((finished.workspace / "services" / f"{name}.json").read_text())["process"] for name in names]
    started = [*services, json.loads((finished.workspace / "engine.json").read_text())["process"]]
    refs = [ProcessRef.model_validate(process) for process in started]
    roots = [process for ref in refs if (process := children.find(ref))]
    assert len(roots) == 4
    tree = [*roots, *(child for process in roots for child in process.children(recursive=True))]
    bystander = subprocess.Popen(["sleep", "60"])
    output = command(environment, *RATCHET, "quickstart", "--stop")
    for name in ("worker", "prefect", "mlflow", "engine"):
        assert name in output
    _, alive = psutil.wait_procs(tree, timeout=20)
    assert not alive
    assert bystander.poll() is None
    bystander.kill()
