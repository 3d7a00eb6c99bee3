"""A disk that is full, and files that are not what they were: a clear error that names the file, and nothing committed is touched."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect.states import State

from flows.step import rl_step
from infra.config import RunConfig
from infra.engines import open_engine
from infra.engines.scripted import ScriptedEngine
from infra.records import AdapterVersion, File, PromptBatch, Rollouts, ScoredRollouts, StepReport, TrainBatch
from infra.settings import settings
from infra.store.files import DigestMismatch, path_of, read_json
from infra.store.layout import StepFolder, run_folder
from infra.trainers.jobs import job_of
from tasks.assemble import assemble
from tasks.roll_out import roll_out
from tasks.score import score

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(900)]


def run(config: RunConfig) -> State[StepReport]:
    return rl_step.with_options(result_storage=settings().results)(config, return_state=True)


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 48 MB."""
    place = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path, room: int) -> Path:
    """A file that leaves this many bytes on the disk."""
    filler = disk / "filler"
    with filler.open("wb") as stream:
        left = shutil.disk_usage(disk).free - room
        while left > 0:
            left -= stream.write(bytes(min(left, 1 << 20)))
    return filler


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.1)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "delivered.json"}


def test_a_full_disk_fails_the_step_and_leaves_what_is_committed(
    small_disk: Path, scripted: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_WORKSPACE", str(small_disk))
    monkeypatch.setenv("RATCHET_MIN_FREE_GIB", "0")  # else the step would not even begin
    settings.cache_clear()
    first = run(scripted).result()
    wait_for(run_folder("r") / "steps/000000/delivered.json")  # else the delivery writes to the disk that is being filled
    committed = contents(run_folder("r") / "steps/000000") | contents(run_folder("r") / "adapters/000001")
    failures = []
    for room in (0, 24_000, 200_000):
        filler = fill(small_disk, room)
        state = run(scripted)
        filler.unlink()
        assert state.is_failed(), f"{room} bytes were enough"
        failures.append(state.message or "")
        assert not list(small_disk.rglob("*.partial")), "litter"
        assert not (run_folder("r") / "steps/000001/manifest.json").exists()
    for failure in failures:
        assert "No space left on device" in failure, failure
    assert {path: path.read_bytes() for path in committed} == committed
    second = run(scripted).result()
    assert (first.adapter.version, second.adapter.version) == (1, 2)
    ScriptedEngine.stop_in(small_disk)
    settings.cache_clear()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, scripted: RunConfig, prefect_server: None) -> Iterator[dict[str, object]]:
    """The records of a committed step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_WORKSPACE", str(tmp_path_factory.mktemp("made")))
        settings.cache_clear()
        run(scripted).result()
        manifest = read_json(run_folder("r") / "steps/000000/manifest.json")
        yield {
            "config": scripted,
            "start": AdapterVersion.model_validate(manifest["adapter_in"]),
            "prompts": PromptBatch.model_validate(manifest["prompts"]),
            "rollouts": Rollouts.model_validate(manifest["rollouts"]),
            "scored": ScoredRollouts.model_validate(manifest["scored"]),
            "batch": TrainBatch.model_validate(manifest["batch"]),
            "trained": AdapterVersion.model_validate(manifest["adapter_out"]),
        }
        ScriptedEngine.stop_in(settings().workspace)
        settings.cache_clear()


def next_job(made: dict) -> None:
    trained, batch = made["trained"], made["batch"]
    onward = batch.model_copy(update={"adapter_version": trained.version, "adapter_sha256": trained.sha256})
    job_of(made["config"].trainer, onward, trained, settings().workspace)


def load(made: dict) -> None:
    engine = open_engine(made["config"].engine, made["trained"])
    engine.wake()
    engine.load_adapter(made["trained"])


def sample_anew(made: dict) -> None:
    StepFolder.of(made["prompts"]).samples_inputs.unlink(missing_ok=True)  # else the finished rollout is taken
    roll_out.fn(made["config"].engine, made["config"].sampling, made["prompts"], made["start"])


READERS: dict[str, tuple[Callable[[dict], File], Callable[[dict], object]]] = {
    "prompts": (lambda made: made["prompts"].file, sample_anew),
    "samples": (
        lambda made: made["rollouts"].file,
        lambda made: score.fn(made["config"].reward, made["rollouts"], made["prompts"]),
    ),
    "scored": (lambda made: made["scored"].file, lambda made: assemble.fn(made["config"].batch, made["scored"])),
    "batch": (lambda made: made["batch"].file, next_job),
    "adapter weights": (lambda made: made["trained"].weights, next_job),
    "first moment": (lambda made: made["trained"].exp_avg, next_job),
    "second moment": (lambda made: made["trained"].exp_avg_sq, next_job),
    "canary": (lambda made: made["trained"].canary, load),
}


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_is_not_what_was_recorded_is_named(made: dict, kind: str, damage: str) -> None:
    file_of, read = READERS[kind]
    path = path_of(file_of(made))
    content = path.read_bytes()
    read(made)  # whole, it is taken
    damaged = {"truncated": content[:-1], "changed": bytes([content[0] ^ 1]) + content[1:]}
    try:
        path.unlink() if damage == "missing" else path.write_bytes(damaged[damage])
        with pytest.raises(DigestMismatch) as caught:
            read(made)
        assert str(path) in str(caught.value)
        assert file_of(made).sha256 in str(caught.value)
    finally:
        path.write_bytes(content)
