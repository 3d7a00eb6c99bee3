"""What all cells of a drill share: a folder, Prefect's server, MLflow's server where it is needed, the base models, the undisturbed digests."""

import contextlib
import json
import os
import shutil
import socket
import sys
import time
import urllib.request
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import carried_cells
import far_cells
import forks
import in_flight_cells
import node_cells
import shared_cells
import strike
import tool_cells
from judge_server import Reply
from matrix import ALL_REAL, SAME_DIGEST, Variant
from shared import SMALL_QWEN3, write_interpreter, write_zero_weights

from infra.config import EnvironmentConfig, RewardConfig, RunConfig

HERE = Path(__file__).parent
LIMIT_S = 240.0
NUM_REPLICAS = 2
TWIN_VERSIONS = {"twin": "1"}
"""What the twins' interpreters say that they have."""


class Session(NamedTuple):
    folder: Path
    first_port: int
    prefect_port: int
    mlflow_port: int | None
    """None: no cell of this drill strikes MLflow."""
    store_port: int
    """Of the S3 server, where a cell has a store."""
    keeps: bool
    """Workspaces of cells that passed, too."""

    @property
    def home(self) -> Path:
        """Workspace of the shared servers."""
        return self.folder / "home"

    @property
    def model(self) -> Path:
        """A tokenizer, and one tensor in the place of weights: the twins need no more."""
        return self.folder / "models" / "for-twins"

    @property
    def real_model(self) -> Path:
        return self.folder / "models" / "random-tiny"

    @property
    def mixture(self) -> Path:
        return self.folder / "models" / "random-tiny-moe"

    @property
    def judge_adapter(self) -> Path:
        return self.folder / "models" / "judge-adapter"

    @property
    def reward_model(self) -> Path:
        return self.folder / "models" / "reward-model"

    @property
    def store(self) -> Path:
        """An empty MLflow store in a file: making its tables takes seconds."""
        return self.folder / "mlflow.db"

    def undisturbed(self, variant: Variant) -> "Undisturbed | None":
        path = self._path_of_undisturbed(variant)
        return Undisturbed(**json.loads(path.read_text())) if path.exists() else None

    def remember_undisturbed(self, variant: Variant, made: "Undisturbed") -> None:
        self._path_of_undisturbed(variant).write_text(json.dumps(made._asdict()))

    def _path_of_undisturbed(self, variant: Variant) -> Path:
        return self.folder / f"undisturbed-{SAME_DIGEST.get(variant, variant)}.json"


class Undisturbed(NamedTuple):
    """What a run came to that nobody disturbed."""

    digest: str
    """Of its adapter."""
    attempt_s: float


def config_of(session: Session, variant: Variant, run: str) -> RunConfig:
    """A small step with short deadlines."""
    is_real, is_slow = variant in ALL_REAL, variant in node_cells.VARIANTS
    model = session.mixture if variant == shared_cells.VARIANT else session.real_model if is_real else session.model
    max_tokens = in_flight_cells.MAX_TOKENS if variant in in_flight_cells.VARIANTS else 24 if is_real else 16
    own = carried_cells.of_run(variant) or shared_cells.of_run(variant)
    return RunConfig.model_validate(
        {
            "name": run,
            **far_cells.settings_of(variant),
            "model": str(model),
            "data": {"num_prompts": 4, "max_prompt_tokens": 128, **own.get("data", {})},
            "engine": {
                "max_context_tokens": 256,
                "start_timeout_s": 240 if is_real else 120 if is_slow else 15,
                "request_timeout_s": 20 if is_real or variant == in_flight_cells.BY_TIME else 10 if is_slow else 2,
                "kv_cache_tokens": 4096,
                "deterministic": variant != in_flight_cells.BY_TIME,
                "replicas": NUM_REPLICAS if variant in ("replicas", "episodes on replicas") else 1,
                **node_cells.engine_of(variant),
                **own.get("engine", {}),
            },
            "sampling": {"group_size": 8 if variant == "real" else 4, "max_output_tokens": max_tokens},
            "trainer": {
                "num_processes": 2,
                "timeout_s": 60 if is_real or is_slow else 5,
                "max_tokens_per_microbatch": 256 if is_real else 16384,
                "mode": "persistent" if variant == "resident" else "per_step",
                "loss": far_cells.loss_of(variant),
                **own.get("trainer", {}),
            },
            "tracking": {"register_every": 1},  # so that the delivery of one step registers its adapter
        }
    )


REWARD = """import time
from infra.rewards.built_in.gsm8k import numeric
def score(*, question, completion, answer):
    time.sleep(0.2)
    return numeric(question=question, completion=completion, answer=answer)
"""


def with_own_reward(config: RunConfig, folder: Path) -> RunConfig:
    """The same rewards by a user's file, which workers call; they carry the cell's mark."""
    path = folder / "mine.py"
    path.write_text(REWARD)
    own = {"name": f"{path}:score", "workers": 2, "timeout_s": 3.0, "environment": ["DRILL_FOLDER"]}
    return config.but(reward=RewardConfig.model_validate(own))


ENVIRONMENT = """import os
from infra.environments.tools import tool

@tool
def note(turn: int, said: str) -> str:
    "An effect that may be made once."
    with open(os.environ["DRILL_FOLDER"] + "/effects.txt", "a") as stream:
        stream.write("x\\n")
    return "%d letters" % len(said)

class Game:
    def reset(self, task):
        self.turn = 0
        return task["question"]

    def step(self, action):
        self.turn += 1
        return note(turn=self.turn, said=action), len(action) % 7 / 7, self.turn == 3
"""
NUM_TURNS = 3


def with_environment(config: RunConfig, folder: Path) -> RunConfig:
    """Episodes of three turns, one at a time, each turn with an effect that may not be made twice. One of them may end without a reward."""
    path = folder / "game.py"
    path.write_text(ENVIRONMENT)
    own = {"name": f"{path}:Game", "workers": 1, "episode_timeout_s": 5.0, "environment": ["DRILL_FOLDER"]}
    return config.but(environment=EnvironmentConfig.model_validate(own), reward=config.reward.but(max_unjudged_frac=0.1))


TASKSET = """import os
import points
import verifiers.v1 as vf

__all__ = ["Game", "Tasks"]


class Data(vf.TaskData):
    answer: str


class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def letters(self, trace) -> float:
        return len(trace.last_reply or "") % 7 / 7


class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for number in range(64):
            yield Task(Data(prompt=None, name=f"What is {number} + 1?", answer=str(number + 1)), self.config.task)


class Game(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents) -> None:
        async with agents.agent.interaction(task) as game:
            said = task.data.name
            for _ in range(3):
                answer = await game.turn(said)
                said = "%d letters" % len(answer.last_reply or "")
                match points.ordered("reward worker"):
                    case "exit 1":
                        os._exit(1)
                    case "garbage":
                        for descriptor in range(3, 64):
                            try:
                                os.write(descriptor, b"garbage" * 1000)
                            except OSError:
                                pass
                    case "raise":
                        raise ValueError("no")
"""


def with_taskset(config: RunConfig, folder: Path) -> RunConfig:
    """The same game as a taskset of verifiers, in verifiers' own environment."""
    path = folder / "drill_taskset.py"
    path.write_text(TASKSET)
    own = {"id": str(path), "workers": 1, "episode_timeout_s": 20.0, "environment": ["DRILL_FOLDER"]}
    return config.but(
        environment=EnvironmentConfig.model_validate(own),
        data=config.data.but(source=f"verifiers:{path}"),
    )


def with_tools(config: RunConfig, folder: Path, variant: str) -> RunConfig:
    """Episodes whose calls of tools are struck. One of them may end without a reward."""
    environment = EnvironmentConfig.model_validate(tool_cells.environment_of(folder, variant))
    return config.but(environment=environment, reward=config.reward.but(max_unjudged_frac=0.1))


def with_reward_model(config: RunConfig, folder: Path) -> RunConfig:
    """Rewards by a model, in four batches."""
    model = {"path": str(folder), "device": "cpu", "max_tokens": 200, "max_tokens_per_batch": 200}
    return config.but(reward=RewardConfig.model_validate({"name": "reward_model", "timeout_s": 3.0, "model": model}))


def with_judge_adapter(config: RunConfig, folder: Path) -> RunConfig:
    """Rewards by an adapter in the run's own engine: 0 or 1."""
    judge = {
        "by": "engine",
        "adapter": str(folder),
        "rubric": RUBRIC,
        "score_pattern": "^([0-9])$",
        "max_score": 9,
        "max_output_tokens": 4,
    }
    return config.but(reward=RewardConfig.model_validate({"name": "rubric", "judge": judge}))


RUBRIC = "<{question}|{completion}|{answer}>"


def with_judge(config: RunConfig, url: str) -> RunConfig:
    """The same rewards by a model that judges: `Grader` is what it answers."""
    judge = {"base_url": url, "model": "grader", "rubric": RUBRIC, "concurrency": 1}
    patience = {"max_attempts": 2, "retry_delay_s": 0.1, "timeout_s": 1.0}
    return config.but(reward=RewardConfig.model_validate({"name": "rubric", "judge": {**judge, **patience}}))


def with_judge_server(config: RunConfig, model: Path) -> RunConfig:
    """Rewards by a second model, a twin of SGLang, that sleeps while the engine samples."""
    judge = {"by": "model", "model": str(model), "rubric": "{question} {completion}", "score_pattern": r"(\d)", "max_score": 9}
    judge |= {"max_output_tokens": 16, "server": {"max_context_tokens": 256}}
    return config.but(reward=RewardConfig.model_validate({"name": "rubric", "judge": judge}))


JUDGE_FAULTS = {
    "SIGKILL": Reply(is_cut=True),  # on a connection that is open; a new one is refused
    "hang": Reply(delay_s=3.0),
    "garbage": Reply(text="I would say that it is fine."),
    "HTTP 429": Reply(status=429, text="too many requests"),
    "HTTP 500": Reply(status=500, text="an error"),
    "HTTP 503": Reply(status=503, text="not now"),
    "reset": Reply(is_cut=True),
}


class Grader:
    """The model that judges, as GSM8K's reward does, unless it has a fault."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self.graded: list[str] = []
        """The prompt of each sound answer: what was paid for."""
        self.num_faulty = 0

    def __call__(self, body: dict[str, Any], number: int) -> Reply:
        from infra.rewards.built_in.gsm8k import numeric

        if self.fault:
            self.num_faulty += 1
            return JUDGE_FAULTS[self.fault]
        prompt = body["messages"][-1]["content"]
        self.graded.append(prompt)
        question, completion, answer = prompt.split(">\n\nAnswer with")[0].removeprefix("<").split("|")
        value = numeric(question=question, completion=completion, answer=answer)
        return Reply(text=json.dumps({"reasoning": "", "score": value}))


@contextlib.contextmanager
def opened(folder: Path, first_port: int, *, needs: Collection[str], keeps: bool) -> Iterator[Session]:
    """Start the servers; end them.

    needs: What some cells need besides: `mlflow`, `real`, `scored` and `judged` models.
    """
    folder.mkdir(parents=True, exist_ok=True)
    session = Session(folder, first_port, first_port, first_port + 1 if "mlflow" in needs else None, first_port + 2, keeps)
    s3: int | None = None
    _do(session, "model", lambda: _make_model(session.model))
    _do(session, "empty-store", lambda: _make_store(session.store))
    if "real" in needs:
        _do(session, "real-model", lambda: _make_real_model(session.real_model, "tiny"))
    if shared_cells.VARIANT in needs:
        _do(session, "mixture", lambda: _make_real_model(session.mixture, "tiny-moe"))
    if "judged" in needs:
        _do(session, "judge-adapter", lambda: _make_judge_adapter(session.judge_adapter, session.model))
    if "scored" in needs:
        _do(session, "reward-model", lambda: _make_reward_model(session.reward_model))
    try:
        _do(session, "servers", lambda: _start_servers(session, "mlflow" in needs))
        if "store" in needs:
            s3 = forks.fork(lambda: _serve_s3(session.store_port), environment_of_home(session), session.folder / "s3.log")
            _do(session, "bucket", lambda: _make_bucket(session.store_port))
        yield session
    finally:
        if s3 is not None:
            strike.send(s3, "SIGKILL")
            forks.wait(s3, 5)
        _do(session, "end", _end_servers)


def _do(session: Session, name: str, work: "object") -> None:
    """In a child: this process stays one that can fork."""
    assert callable(work)
    log = session.folder / f"{name}.log"
    code = forks.wait(forks.fork(lambda: work() or 0, environment_of_home(session), log), LIMIT_S)
    if code != 0:
        raise SystemExit(f"{name} failed ({code}); the end of {log}:\n{log.read_text()[-3000:]}")


PASSWORD = "drill:drill"
"""Of the session's Prefect server; its cells have workspaces of their own."""


def environment_of_home(session: Session) -> dict[str, str]:
    return {
        "RATCHET_PREFECT_AUTH": PASSWORD,
        "RATCHET_WORKSPACE": str(session.home),
        "RATCHET_PREFECT_PORT": str(session.first_port),
        "RATCHET_MLFLOW_PORT": str(session.first_port + 1),
        "PREFECT_HOME": str(session.home / "prefect"),
    }


def _start_servers(session: Session, needs_mlflow: bool) -> None:
    from infra.services import servers

    os.environ.pop("PREFECT_API_URL", None)
    url = servers.ensure_prefect()
    assert f":{session.prefect_port}/" in url, f"port {session.prefect_port} is taken: choose another --port"
    if needs_mlflow:
        url = servers.ensure_mlflow()
        assert url.endswith(str(session.mlflow_port)), f"port {session.mlflow_port} is taken: choose another --port"


def _serve_s3(port: int) -> int:
    os.execv(sys.executable, [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)])


def _make_bucket(port: int) -> None:
    import boto3  # type: ignore[import-untyped]

    url = f"http://127.0.0.1:{port}"
    await_answer(f"{url}/moto-api/", LIMIT_S)
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=url, **keys).create_bucket(Bucket=far_cells.BUCKET)


def _end_servers() -> None:
    from flows.cli.services.servers import stop

    stop()


def _make_model(folder: Path) -> None:
    from infra.tiny_model.tokenizer import train_tokenizer

    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        train_tokenizer().save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(SMALL_QWEN3))
        write_zero_weights(folder)


def _make_real_model(folder: Path, kind: Literal["tiny", "tiny-moe"]) -> None:
    from infra.tiny_model.architecture import random_model
    from infra.tiny_model.tokenizer import train_tokenizer

    if not (folder / "config.json").exists():
        tokenizer = train_tokenizer()
        tokenizer.save_pretrained(folder)
        random_model(kind, tokenizer, 0).save_pretrained(folder)


def _make_reward_model(folder: Path) -> None:
    from reward_models import made

    if not (folder / "config.json").exists():
        made("qwen2", folder)


def _make_judge_adapter(folder: Path, model: Path) -> None:
    import numpy as np
    import safetensors.numpy

    from infra.models.architecture import linear_shapes, read_architecture

    folder.mkdir(parents=True, exist_ok=True)
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    tensors = {}
    for name, (out, into) in linear_shapes(read_architecture(model)).items():
        if name.endswith("q_proj"):
            tensors[f"base_model.model.{name}.lora_A.weight"] = np.ones((2, into), np.float32)
            tensors[f"base_model.model.{name}.lora_B.weight"] = np.ones((out, 2), np.float32)
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")


def digits_of(model: Path) -> list[int]:
    """Return the ids of the tokens 0 and 1."""
    from infra.models import base_model

    found = base_model.tokenizer(model)(["0", "1"], add_special_tokens=False)["input_ids"]
    return [int(ids[-1]) for ids in found]


def _make_store(path: Path) -> None:
    from mlflow import MlflowClient

    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()


def write_interpreters(folder: Path, *, real: bool) -> dict[str, str]:
    """What starts the twins in the place of SGLang and torchrun (the real trainer with a point, where all is real); as settings."""
    programs = {"RATCHET_TRAINER_PYTHON": ("real_trainer.py" if real else "twin_trainer.py", 0)}
    programs |= {} if real else {"RATCHET_SGLANG_PYTHON": ("twin_engine.py", 1)}
    settings = {}
    for setting, (script, num_words_less) in programs.items():
        program, versions = folder / f"python-of-{Path(script).stem}", None if script == "real_trainer.py" else TWIN_VERSIONS
        write_interpreter(program, f"{sys.executable} {HERE / script}", versions, num_words_less=num_words_less)
        settings[setting] = str(program)
    return settings


def copy_store(session: Session, workspace: Path) -> None:
    (workspace / "mlflow").mkdir(parents=True, exist_ok=True)
    shutil.copy(session.store, workspace / "mlflow/mlflow.db")


def await_answer(url: str, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).read()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
