"""The flow's side of the program that holds a reward model: it is started, asked, and ended here."""

import atexit
import json
import logging
import os
import select
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.concurrency.deadline import NO_DEADLINE, Deadline
from infra.config import RewardConfig, RewardModelConfig
from infra.failures import RewardFailed
from infra.machine import devices
from infra.processes import children, gpu_programs
from infra.processes.logs import last_lines
from infra.progress.brief import brief
from infra.rewards import frames
from infra.rewards.models.checks import digest, folder_of
from infra.rewards.models.protocol import ModelSpec, Score
from infra.rewards.outcome import DIED, TIME_OUT
from infra.settings import CHECKOUT, main_python, settings
from infra.store.layout import Workspace

log = logging.getLogger(__name__)

PROGRAM = "infra.rewards.models.program"
LOG = "reward-model.log"
"""What the program prints, in the workspace's folder of logs."""
MAX_ANSWER_BYTES = 2**26
SPEC_TIMEOUT_S = 5.0
"""For a few hundred bytes into an empty pipe."""


class ScorerLost(RuntimeError):
    """The program ended, or gave no answer in time. It is ended by then."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """DIED or TIME_OUT."""


def log_path() -> Path:
    return Workspace.here().logs / LOG


def device_of(config: RewardModelConfig) -> devices.Device:
    return devices.device() if config.device == "auto" else config.device


def spec_of(config: RewardModelConfig) -> ModelSpec:
    device = device_of(config)
    dtype = "float32" if config.dtype == "auto" and device == "cpu" else devices.dtype_of(config.dtype)
    threads = settings().num_cpu_threads or os.cpu_count() or 1
    return ModelSpec(str(folder_of(config)), config.label, device, dtype, threads)


class ScorerProgram:
    """A program that holds one model."""

    def __init__(self, config: RewardModelConfig, spec: ModelSpec) -> None:
        """Start it. It reads the model into host memory. Raises ScorerLost if it ends at once."""
        self.config, self.spec, self.name, self.owner = config, spec, config.path, os.getpid()
        self.is_ready = False
        theirs, self._requests = os.pipe()
        self._results, give = os.pipe()
        python = str(settings().trainer_python or main_python())
        try:
            self._process = gpu_programs.start(
                gpu_programs.REWARD_MODEL,
                [python, "-m", PROGRAM, str(theirs), str(give), str(self.owner)],
                log_path(),
                _environment(spec.device),
                state_file=None,
                cwd=CHECKOUT,
                descriptors=(theirs, give),
            )
        except BaseException:
            os.close(self._requests)
            os.close(self._results)
            raise
        finally:
            os.close(theirs)
            os.close(give)
        os.set_blocking(self._requests, False)
        self._reader = frames.Reader(MAX_ANSWER_BYTES)
        try:
            self._send(frames.packed(json.dumps(spec._asdict()).encode()), time.monotonic() + SPEC_TIMEOUT_S)
        except OSError as error:
            self.close()
            raise ScorerLost(DIED, f"the program of its reward model has ended: {error}") from error

    def make_ready(self, deadline: Deadline = NO_DEADLINE) -> None:
        """Have the model on its device. Raises ScorerLost if the program ends or hangs before, RewardFailed if the model cannot be loaded."""
        if not self.is_ready:
            self._note(self._exchange({"place": True}, deadline.at_most(self.config.load_timeout_s)), self.spec)
            self.is_ready = True

    def _note(self, answer: dict[str, Any], spec: ModelSpec) -> None:
        if "failed" in answer:
            self.close()
            raise RewardFailed(f"reward model {self.name!r} cannot be loaded: {answer['failed']}")
        size = answer["ready"]
        brief.info(
            "reward model %s: %s parameters, %.2f GiB in %s on %s",
            *(self.name, f"{size['num_parameters']:,}", size["num_bytes"] / 2**30, spec.dtype, spec.device),
        )

    def ask(self, rows: Sequence[Sequence[int]], timeout_s: float) -> list[Score]:
        """Return the score of each row of token ids. Raises ScorerLost."""
        answer = self._exchange({"rows": [list(row) for row in rows]}, timeout_s)
        return [(value, reason, message) for value, reason, message in answer["scores"]]

    def _exchange(self, content: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        try:
            self._send(frames.packed(json.dumps(content).encode()), deadline)
            return self._received(deadline)
        except TimeoutError as error:
            self.close()
            raise ScorerLost(TIME_OUT, f"its reward model gave no result in {timeout_s:g} s") from error
        except OSError as error:
            self.close()
            raise ScorerLost(DIED, f"the program of its reward model has ended: {error}") from error
        except BaseException:
            self.close()
            raise

    def _send(self, data: bytes, deadline: float) -> None:
        """Write to the program's pipe. A batch is longer than a pipe holds, and a program that hangs reads nothing."""
        view = memoryview(data)
        while view:
            if not select.select([], [self._requests], [], max(0.0, deadline - time.monotonic()))[1]:
                raise TimeoutError
            view = view[os.write(self._requests, view) :]

    def _received(self, deadline: float) -> dict[str, Any]:
        while True:
            if not select.select([self._results], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            if not (data := os.read(self._results, 2**18)):
                raise ScorerLost(DIED, "the program of its reward model has ended")
            for message in self._reader.take(data):
                answer: dict[str, Any] = json.loads(message)
                return answer
            if self._reader.is_broken:
                raise ScorerLost(DIED, "the program of its reward model wrote what is no message")

    @property
    def is_open(self) -> bool:
        return self._requests >= 0 and self.owner == os.getpid() and children.find(self._process) is not None

    def close(self) -> None:
        """End the program. Returns when it is gone, and its memory with it."""
        if self._requests < 0 or self.owner != os.getpid():
            return
        os.close(self._requests)
        os.close(self._results)
        self._requests = -1
        gpu_programs.stop(self._process)


def _environment(device: str) -> dict[str, str]:
    shared = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if device == "cpu":
        return shared | {"CUDA_VISIBLE_DEVICES": ""}
    if gpus := settings().trainer_gpus:
        return shared | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(gpus[0])}
    return shared


_OPEN: dict[tuple[ModelSpec, str], ScorerProgram] = {}
"""By spec and digest of the model's files: a program that has read other weights, under the same path, is not used."""
_LOCK = threading.RLock()


# Perf: a start takes 10.7 s, a scoring of 512 samples 1.4 s (494 M parameters, H200, docs/results/rewards.md).
def begun(config: RewardConfig) -> ScorerProgram:
    """Return the program that holds the model or reads it into host memory. It is started unless this process has it, and not waited for."""
    key = spec, _ = spec_of(config.model), digest(config.model)
    with _LOCK:
        found = _OPEN.get(key)
        if found is None or not found.is_open:
            close_all()
            found = _OPEN[key] = ScorerProgram(config.model, spec)
        return found


def opened(config: RewardConfig, deadline: Deadline = NO_DEADLINE) -> ScorerProgram:
    """Return the program that holds the model on its device. Raises as ScorerProgram.make_ready does."""
    program = begun(config)
    program.make_ready(deadline)
    return program


def close_all() -> None:
    """End the programs of this process."""
    with _LOCK:
        while _OPEN:
            _OPEN.popitem()[1].close()


def sleep(config: RewardModelConfig) -> None:
    """Free the GPU for the engine and the trainer: the program is ended, since a context that stays would hold memory. On a CPU it stays."""
    if device_of(config) == "cuda":
        close_all()


def last_words() -> str:
    path = log_path()
    return f"; the end of {path}:\n{last_lines(path)}" if path.exists() else ""


atexit.register(close_all)
