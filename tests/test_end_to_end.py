"""Two whole steps of one run with the real parts: SGLang, Megatron under torchrun, Prefect's server and worker, MLflow.

The first step is made by quickstart, the second by hand with Prefect's own command, with two trainer processes that split the
model between them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from safetensors import safe_open

from infra import base_model, processes
from infra.config import RunConfig
from infra.processes import ProcessRef
from infra.settings import CHECKOUT, DEFAULT_WORKSPACE, settings

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(1800)]

RUN = "e2e"
FIRST_PORT = 24200


class Finished(NamedTuple):
    workspace: Path
    first_output: str
    second_output: str
    api_url: str
    mlflow_url: str

    def step(self, index: int) -> Path:
        return self.workspace / "runs" / RUN / "steps" / f"{index:06d}"

    def read(self, index: int, name: str) -> Any:
        return json.loads((self.step(index) / name).read_text())


def command(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


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
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))} | ours
    yield environment
    command(environment, "flows.quickstart", "--stop")


@pytest.fixture(scope="module")
def finished(environment: dict[str, str]) -> Finished:
    small = ["--set", "data.num_prompts=8", "--set", "sampling.max_output_tokens=40"]
    first = command(environment, "flows.quickstart", "--run", RUN, *small)
    workspace = Path(environment["RATCHET_WORKSPACE"])
    api_url, mlflow_url = (
        json.loads((workspace / "services" / f"{name}.json").read_text())["url"] for name in ("prefect", "mlflow")
    )
    config = RunConfig.model_validate_json((workspace / "runs" / RUN / "config.json").read_text())
    split = config.but(trainer=config.trainer.but(num_processes=2, tensor_parallel=2))
    by_hand = environment | {"PREFECT_API_URL": api_url}
    parameters = json.dumps({"config": split.model_dump(mode="json")})
    second = command(by_hand, "prefect", "deployment", "run", "rl-step/local", "--params", parameters, "--watch")
    return Finished(workspace, first, second, api_url, mlflow_url)


def test_quickstart_shows_progress_a_table_and_both_pages(finished: Finished) -> None:
    for expected in ("rollout: ", "micro-batch", "reward/mean", "time/train_s", "adapter SHA-256", finished.mlflow_url):
        assert expected in finished.first_output
    assert finished.api_url.removesuffix("/api") in finished.first_output


def test_the_second_step_goes_on_from_the_first(finished: Finished) -> None:
    first, second = finished.read(0, "manifest.json"), finished.read(1, "manifest.json")
    assert (first["adapter_in"]["version"], first["adapter_out"]["version"], second["adapter_out"]["version"]) == (0, 1, 2)
    assert second["adapter_in"] == first["adapter_out"]
    assert second["rollouts"]["adapter_sha256"] == first["adapter_out"]["weights"]["sha256"]
    assert first["prompts"]["file"]["sha256"] != second["prompts"]["file"]["sha256"]


def test_adam_goes_on_where_it_was(finished: Finished) -> None:
    with safe_open(finished.workspace / "runs" / RUN / "adapters/000002/state/optimizer.safetensors", "np") as state:
        assert json.dumps(state.metadata()).count('"2"') == 1
        assert all(state.get_tensor(name).any() for name in state.keys() if name.startswith("exp_avg_sq") and "lora_B" in name)  # noqa: SIM118


def test_the_engine_stays_awake_between_steps(finished: Finished) -> None:
    assert json.loads((finished.workspace / "engine-launches.json").read_text()) == 1
    assert finished.read(1, "report.json")["metrics"]["time/wake_s"] < 5


def test_engine_and_trainer_agree_on_every_sampled_token(finished: Finished) -> None:
    for step in (0, 1):
        metrics = finished.read(step, "report.json")["metrics"]
        assert 0 < metrics["mismatch/mean_abs_logprob_diff"] < 1e-3
        assert metrics["train/grad_norm"] > 0


def test_a_cpu_releases_nothing_and_says_so(finished: Finished) -> None:
    assert finished.read(0, "manifest.json")["hand_over"]["hand_over"] == "resident"
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
        assert [row.step for row in history] == [0, 1]
        assert history[1].value == pytest.approx(value)
    assert run.data.params["trainer.lora.rank"] == "8"
    assert run.inputs.dataset_inputs[0].dataset.name == "arithmetic"
    assert {file.path for file in client.list_artifacts(run.info.run_id, "adapters/000002")} == {
        "adapters/000002/adapter_config.json",
        "adapters/000002/adapter_model.safetensors",
    }
    versions = client.search_model_versions(f"name = '{RUN}'")
    assert {version.tags["ratchet.adapter"] for version in versions} == {"1", "2"}
    assert client.get_model_version_by_alias(RUN, "best").version in {version.version for version in versions}


def test_prefect_has_the_report_the_samples_and_the_logs_of_engine_and_trainer(finished: Finished) -> None:
    def found(what: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = httpx.post(f"{finished.api_url}/{what}/filter", json=body).raise_for_status().json()
        assert isinstance(answer, list)
        return answer

    artifacts = {artifact["key"]: artifact["type"] for artifact in found("artifacts", {}) if artifact["key"]}
    assert artifacts == {"e2e-step": "markdown", "e2e-samples": "table", "e2e-mlflow": "markdown"}
    messages = "\n".join(
        line["message"] for page in range(0, 1000, 200) for line in found("logs", {"limit": 200, "offset": page})
    )
    assert "sglang: " in messages and "trainer: micro-batch" in messages


def test_the_form_in_the_ui_shows_every_section_with_its_help(finished: Finished) -> None:
    deployment = httpx.get(f"{finished.api_url}/deployments/name/rl-step/local").raise_for_status().json()
    schema = deployment["parameter_openapi_schema"]
    sections = schema["definitions"]["RunConfig"]["properties"]
    assert set(RunConfig.model_fields) == set(sections)
    assert "prompt" in schema["definitions"]["DataConfig"]["properties"]["num_prompts"]["description"].lower()


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


def test_stop_ends_what_was_started_and_only_that(finished: Finished, environment: dict[str, str]) -> None:
    services = [json.loads(path.read_text())["process"] for path in (finished.workspace / "services").glob("*.json")]
    started = [*services, json.loads((finished.workspace / "engine.json").read_text())["process"]]
    refs = [ProcessRef.model_validate(process) for process in started]
    roots = [process for ref in refs if (process := processes.find(ref))]
    assert len(roots) == 4
    tree = [*roots, *(child for process in roots for child in process.children(recursive=True))]
    bystander = subprocess.Popen(["sleep", "60"])
    output = command(environment, "flows.quickstart", "--stop")
    for name in ("worker", "prefect", "mlflow", "engine"):
        assert name in output
    _, alive = psutil.wait_procs(tree, timeout=20)
    assert not alive
    assert bystander.poll() is None
    bystander.kill()
