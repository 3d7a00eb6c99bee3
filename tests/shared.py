"""What several test modules and drills need; on the path as `shared`."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from infra.config import RunConfig
    from infra.records import AdapterVersion
    from infra.store.samples import Sample

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""Which of pytest-xdist's workers this process is."""
FIRST_PORT = int(os.environ.get("RATCHET_TEST_FIRST_PORT", "24200")) + 2000 * WORKER
"""Of 2,000 for each worker: two runs of the tests on one machine need another first one each."""

RATCHET = (sys.executable, "-c", "from flows.cli.app import main; main()")
"""The program `ratchet` of this checkout, as the script of that name in the environment starts it; its options follow."""

QWEN_COMMON = {"max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
DENSE_7B = {
    **QWEN_COMMON,
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
"""Qwen2.5-7B, as config.json has it."""

SMALL_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 512,
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
"""config.json of a model with the vocabulary of the tiny ones."""


def write_zero_weights(folder: "Path") -> None:
    """Zeros in the place of the weights that the folder's config.json asks for."""
    import numpy as np
    import safetensors.numpy

    from infra.models.architecture import base_shapes, read_architecture

    weights = {name: np.zeros(shape, np.float16) for name, shape in base_shapes(read_architecture(folder)).items()}
    safetensors.numpy.save_file(weights, folder / "model.safetensors")


def load_module(path: "Path") -> "ModuleType":
    """Import a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_sglang(program: str, *arguments: "Path") -> str:
    """Run Python code in SGLang's environment, on one thread; gives what it printed."""
    from infra.settings import settings

    done = subprocess.run(
        [str(settings().sglang_python), "-W", "ignore", "-c", program, *map(str, arguments)],
        env={"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def becomes(claim: Callable[[], bool], within_s: float = 20) -> bool:
    """Whether the claim holds before the time is over."""
    deadline = time.monotonic() + within_s
    while not claim():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def prefect_harness() -> Iterator[None]:
    """Prefect's own, which gives up where the port that it found free is answered by somebody else a moment later: tried again then."""
    import httpx
    from prefect.testing.utilities import prefect_test_harness

    with ExitStack() as stack:
        for tries_left in (2, 1, 0):
            try:
                stack.enter_context(prefect_test_harness(server_startup_timeout=120))
                break
            except httpx.TransportError:
                if not tries_left:
                    raise
        yield


def is_gone(pid: int) -> bool:
    """Ended; whether its parent has asked for its exit status does not matter."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def sample(prompt_id: int = 0) -> "Sample":
    """Of one token, finished, without a reward."""
    from infra.store.samples import Sample

    return Sample(
        prompt_id=prompt_id,
        sample_index=0,
        prompt_tokens=[1],
        output_tokens=[3],
        output_logprobs=[-0.5],
        finish_reason="stop",
        adapter_version=1,
        adapter_sha256="abc",
    )


def commit(config: "RunConfig", step: int, metrics: dict[str, float], *, weights: bytes = b"weights", **more: object) -> None:
    """What a committed step leaves behind, as far as MLflow is concerned; more: of its manifest."""
    from infra.records import AdapterVersion, BaseModelRef, StepReport
    from infra.store.files import record_of, write, write_json
    from infra.store.layout import adapter_folder, run_folder

    run, folder = config.name, run_folder(config.name) / "steps" / f"{step:06d}"
    file = write(adapter_folder(run, step + 1) / "adapter_model.safetensors", weights)
    adapter = AdapterVersion(
        run=run,
        version=step + 1,
        base=BaseModelRef(id="tiny", sha256="b"),
        rank=8,
        alpha=16,
        target_modules=("q_proj",),
        seed=0,
        weights=record_of(file),
    )
    report = StepReport(run=run, step=step, adapter=adapter, metrics=metrics)
    about = {
        "committed_at": 1000.0 + step,
        "config": config.model_dump(mode="json"),
        "prompts": {"dataset_fingerprint": "f" * 64},
    }
    write_json(run_folder(run) / "config.json", about["config"])
    write_json(folder / "report.json", report.model_dump(mode="json"))
    write_json(folder / "manifest.json", about | more)


def write_manifest(config: "RunConfig", start: "AdapterVersion", made: "AdapterVersion") -> "Path":
    """Write the manifest of the step that made an adapter of another one; the files of its other products do not exist."""
    from infra.records import EngineRan, File, PromptBatch, Rollouts, ScoredRollouts, TrainBatch, TrainerRan
    from infra.runs.manifest import Manifest, environment
    from infra.store.files import write_json
    from infra.store.layout import MANIFEST, step_folder_of
    from infra.telemetry.program_versions import of_engine, of_trainer

    step = start.version
    file = File(path=f"runs/{config.name}/steps/{step:06d}/x", sha256="0" * 64, num_bytes=1)
    place = {"run": config.name, "step": step}
    about = place | {"adapter_version": step, "adapter_sha256": start.sha256, "file": file}
    counts = {"num_prompts": 2, "group_size": 4, "temperature": 1.0, "num_samples": 8}
    whole = Manifest(
        **place,
        config=config,
        adapter_in=start,
        prompts=PromptBatch(**place, file=file, num_prompts=2, dataset_fingerprint="f", first_row=0),
        rollouts=Rollouts(**about, **counts, num_output_tokens=9, num_truncated=0),
        scored=ScoredRollouts(**about, **counts, mean_reward=0.5, std_reward=0.5, num_trainable_groups=1),
        batch=TrainBatch(**about, num_sequences=8, num_tokens=20, num_loss_tokens=9),
        adapter_out=made,
        colocation={},
        engine=EngineRan(kind="scripted", identity="scripted-1", flags=(), versions=of_engine("scripted"), backends={}),
        trainer=TrainerRan(versions=of_trainer(), backends={}),
        reward_source="",
        committed_at=1.0,
        **dict(environment()),
    )
    return write_json(step_folder_of(config.name, step) / MANIFEST, whole.model_dump(mode="json"))


def write_interpreter(
    python: "Path", program: str, versions: "Mapping[str, str] | None" = None, *, num_words_less: int = 1
) -> "Path":
    """Write what stands for the interpreter of another environment: a shell script that starts a program instead.

    program: As a shell reads it; gets the arguments but for the first num_words_less.
    versions: What it says that it has; None: those of this test's own environment.
    """
    told = python.with_name(f"{python.name}.versions.json")
    told.write_text(json.dumps({"versions": dict(versions or {}), "has_bytecode": True, "path": [str(told)]}))
    say = f"cat {told}; exit" if versions is not None else f'exec {sys.executable} "$@"'
    python.write_text(f'#!/bin/sh\ncase "$1" in */read_versions.py) {say};; esac\nshift {num_words_less}\nexec {program} "$@"\n')
    python.chmod(0o755)
    return python


def untrained_adapter(model: "Path") -> "AdapterVersion":
    """Version 0 of run `r`: the base model in the folder."""
    from infra.records import AdapterVersion, BaseModelRef

    base = BaseModelRef(id=str(model), sha256="0" * 64)
    return AdapterVersion(run="r", version=0, base=base, rank=8, alpha=16, target_modules=("q_proj",), seed=0)


def written_adapter(adapter_config: str) -> "AdapterVersion":
    """Adapter 1 of run `r` on the model `tiny`, with files that have digests and no tensors."""
    from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS
    from infra.records import AdapterVersion, BaseModelRef
    from infra.store.files import record_of, write
    from infra.store.layout import adapter_folder

    folder = adapter_folder("r", 1)
    return AdapterVersion(
        run="r",
        version=1,
        base=BaseModelRef(id="tiny", sha256="0"),
        rank=8,
        alpha=16,
        target_modules=("q_proj",),
        seed=0,
        weights=record_of(write(folder / ADAPTER_WEIGHTS, b"weights")),
        adapter_config=record_of(write(folder / ADAPTER_CONFIG, adapter_config.encode())),
    )


STEP_PROGRAM = """
import pathlib, sys
from flows.step import rl_step
from infra.config import RunConfig
state = rl_step(RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_bytes()), return_state=True)
sys.exit(0 if state.is_completed() else 1)
"""


def step_in(folder: "Path", config: "RunConfig") -> "subprocess.CompletedProcess[str]":
    """One rl-step in a process of its own that works in a folder of its own."""
    from prefect.settings import PREFECT_API_URL

    from infra.settings import CHECKOUT

    folder.mkdir()
    (folder / "config.json").write_text(config.model_dump_json())
    url = PREFECT_API_URL.value()
    assert url
    return subprocess.run(
        [sys.executable, "-c", STEP_PROGRAM, "config.json"],
        cwd=folder,
        env=os.environ | {"PREFECT_API_URL": url, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def program_with(
    config: "RunConfig", folder: "Path", code: str, *arguments: str, stdout: int | None = None
) -> "subprocess.Popen[str]":
    """Start code in a process of its own, with the configuration's file and further arguments, and the folder as its workspace.

    It has no Prefect server to talk to and starts one for the time of a call, as `rl_run(...)` in a script does. What it says is in said.log.
    """
    from infra.settings import CHECKOUT

    folder.mkdir(exist_ok=True)
    (folder / "asked.json").write_text(config.model_dump_json())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    own = {
        "RATCHET_WORKSPACE": str(folder),
        "PREFECT_HOME": str(folder / "prefect-home"),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
        "PYTHONPATH": str(CHECKOUT),
    }
    with (folder / "said.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-c", code, str(folder / "asked.json"), *arguments],
            cwd=folder,
            env=environment | own,
            stdout=log if stdout is None else stdout,
            stderr=log,
            text=True,
            start_new_session=True,
        )


def last_states() -> dict[str, str]:
    """Of the latest flow run: each task and how it ended."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        [flow_run] = client.read_flow_runs(limit=1, sort=FlowRunSort.START_TIME_DESC)
        of_it = FlowRunFilter(
            id=FlowRunFilterId(any_=[flow_run.id])
        )  # the server has other tests' task runs, more than it tells at once
        return {run.name.rpartition("-")[0]: run.state_name or "" for run in client.read_task_runs(flow_run_filter=of_it)}
