"""Tiny models with random weights, batches, jobs, and three ways to run a job: here, as real programs, and on several ranks."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from infra.megatron.__main__ import main
from infra.megatron.model import parallel
from infra.megatron.protocol.job import ADAPTER_WEIGHTS, CANARY, Canary, TrainJob, TrainResult
from infra.megatron.protocol.optimizer_files import MOMENTS, num_steps
from infra.store.digests import sha256_of

ROOT = Path(__file__).parents[3]
VOCAB_SIZE = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.08,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
LLAMA_31_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


def _make(name: str) -> PreTrainedModel:
    match name:
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True))
        case "qwen3-untied":
            return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False))
        case "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True))
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
        case "llama3.1":  # of 8 frequencies 3 stay, 4 are divided by 8, one lies between
            scaled = SHAPE | {"rope_parameters": LLAMA_31_ROPE}
            return LlamaForCausalLM(LlamaConfig(**scaled, tie_word_embeddings=False))
        case "qwen3-moe":
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=32, norm_topk_prob=True))
        case "qwen3-moe-raw":
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=32, norm_topk_prob=False))
    raise ValueError(name)


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """Of a job that failed in this process, which would fail all jobs after it."""
    yield
    if dist.is_initialized():
        parallel.stop()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name -> Hugging Face folder; each is made once."""
    folder = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        if not (folder / name).exists():
            torch.manual_seed(0)
            made = _make(name).float()
            for parameter in made.parameters():
                if parameter.ndim == 1:  # norms and biases start at one and zero, where a mix-up would not show
                    parameter.data += 0.2 * torch.randn_like(parameter)
            made.save_pretrained(folder / name)
        return folder / name

    return get


@pytest.fixture
def hugging_face() -> Callable[[Path], PreTrainedModel]:
    return lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., dict[str, Tensor]]:
    """Random sequences with random rollout log-probabilities."""

    def make(seed: int = 0, num_sequences: int = 8, max_tokens: int = 40) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        parts: dict[str, list[Tensor]] = {"tokens": [], "loss_mask": [], "rollout_logprobs": [], "advantages": []}
        starts = [0]
        for _ in range(num_sequences):
            length = int(torch.randint(12, max_tokens, (1,), generator=generator))
            prompt = int(torch.randint(3, 8, (1,), generator=generator))
            is_loss = torch.arange(length) >= prompt
            parts["tokens"].append(torch.randint(0, VOCAB_SIZE, (length,), generator=generator))
            parts["loss_mask"].append(is_loss.to(torch.uint8))
            parts["rollout_logprobs"].append((-6.5 + 0.4 * torch.randn(length, generator=generator)) * is_loss)
            parts["advantages"].append(torch.randn(1, generator=generator) * is_loss)
            starts.append(starts[-1] + length)
        return {name: torch.cat(values) for name, values in parts.items()} | {"cu_seqlens": torch.tensor(starts)}

    return make


@pytest.fixture(scope="session")
def make_tree() -> Callable[..., dict[str, Tensor]]:
    """A batch whose sequences begin alike in every way that there is."""

    def make(seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def tokens(count: int) -> list[int]:
            found: list[int] = torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist()
            return found

        prompt, short, long, said, history = tokens(14), tokens(1), tokens(9), tokens(3), tokens(8)
        answer, turn, seen = tokens(7), tokens(6), tokens(4)
        # Group, parts; a part is its tokens and whether they are in the loss.
        sequences: list[tuple[int, list[tuple[list[int], bool]]]] = [
            (7, [(prompt, False), (tokens(9), True)]),
            (7, [(prompt, False), (said + tokens(12), True)]),
            (2, [(short, False), (answer, True)]),
            (7, [(prompt, False), (said + tokens(5), True)]),
            (7, [(prompt, False), (tokens(1), True)]),
            (2, [(short, False), (answer, True)]),  # an equal answer
            (2, [(short, False), (answer[:4], True)]),  # one that begins it
            (5, [(history, False), (turn, True), (seen, False), (tokens(5), True)]),  # two turns
            (
                5,
                [(history, False), (turn, False), (tokens(3), False), (tokens(6), True)],
            ),  # from its first turn, no longer in the loss
            (5, [(history, False), (turn, True), (seen, False), (tokens(2), True), (tokens(3), False)]),
            (9, [(long, False), (tokens(11), True)]),  # alone
            (7, [(prompt, False), (tokens(4), False)]),  # teaches nothing
        ]
        lengths = [sum(len(part) for part, _ in parts) for _, parts in sequences]
        is_loss = torch.tensor([flag for _, parts in sequences for part, flag in parts for _ in part])
        advantages = torch.randn(len(sequences), generator=generator).repeat_interleave(torch.tensor(lengths))
        return {
            "tokens": torch.tensor([token for _, parts in sequences for part, _ in parts for token in part]),
            "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
            "loss_mask": is_loss.to(torch.uint8),
            "rollout_logprobs": (-6.5 + 0.4 * torch.randn(len(is_loss), generator=generator)) * is_loss,
            "advantages": advantages * is_loss,
            "groups": torch.tensor([group for group, _ in sequences]),
        }

    return make


@dataclass(frozen=True)
class Run:
    """A job and what came of it."""

    job: TrainJob
    path: Path

    @property
    def result(self) -> TrainResult:
        return TrainResult.model_validate_json(self.job.result_path.read_bytes())

    @property
    def metrics(self) -> dict[str, float]:
        return {name: value for name, value in self.result.metrics.items() if name != "train/tokens_per_s"}

    @property
    def adapter(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = load_file(self.job.output_dir / ADAPTER_WEIGHTS)
        return tensors

    @property
    def moments(self) -> dict[str, Tensor]:
        """By moment and name, as `exp_avg.<name>`."""
        files = {which: load_file(self.job.output_dir / name) for which, name in MOMENTS.items()}
        return {f"{which}.{name}": tensor for which, tensors in files.items() for name, tensor in tensors.items()}

    @property
    def canary(self) -> Canary:
        return Canary.model_validate_json((self.job.output_dir / CANARY).read_bytes())

    def assert_same_bytes(self, expected: "Run") -> None:
        """Adapter, optimizer state and metrics are those of another run."""
        names = sorted(path.relative_to(expected.job.output_dir) for path in expected.job.output_dir.rglob("*") if path.is_file())
        assert names
        for name in names:
            assert (self.job.output_dir / name).read_bytes() == (expected.job.output_dir / name).read_bytes(), name
        assert self.metrics == expected.metrics

    def written(self) -> list[Path]:
        return [*self.job.output_dir.rglob("*"), *self.job.result_path.parent.glob("result*")]


NewJob = Callable[..., Run]


@pytest.fixture(scope="session")
def new_job(
    tmp_path_factory: pytest.TempPathFactory, model: Callable[[str], Path], make_batch: Callable[..., dict[str, Tensor]]
) -> NewJob:
    """A job that is ready to run; `after` is a run whose adapter it goes on from, other keywords are TrainerConfig's."""

    def make(
        name: str = "qwen3",
        *,
        after: Run | None = None,
        batch: dict[str, Tensor] | None = None,
        metadata: dict[str, str] | None = None,
        job: dict[str, Any] | None = None,
        **trainer: Any,
    ) -> Run:
        folder = tmp_path_factory.mktemp("job")
        (folder / "out").mkdir()
        version = after.result.adapter_version if after else 0
        digest = sha256_of(after.job.output_dir / ADAPTER_WEIGHTS) if after else "base"
        said = {"adapter_version": str(version), "adapter_sha256": digest, "temperature": "1.0"} | (metadata or {})
        save_file(make_batch() if batch is None else batch, folder / "batch.safetensors", said)
        fields = {
            "model_path": model(name),
            "base_model_id": name,
            "adapter_path": after.job.output_dir if after else None,
            "adapter_version": version,
            "adapter_sha256": digest,
            "moments_sha256": {which: sha256_of(after.job.output_dir / name) for which, name in MOMENTS.items()} if after else {},
            "num_optimizer_steps": after.result.num_optimizer_steps if after else 0,
            "batch_path": folder / "batch.safetensors",
            "output_dir": folder / "out",
            "result_path": folder / "result.json",
            "seed": 0,
            "num_threads": 1,
            "device": "cpu",
            "trainer": {"learning_rate": 1e-2} | trainer,
        }
        whole = TrainJob.model_validate(fields | (job or {}))
        (folder / "job.json").write_text(whole.model_dump_json())
        return Run(whole, folder / "job.json")

    return make


@pytest.fixture(scope="session")
def train(new_job: NewJob) -> NewJob:
    """Make a job and run it in this process, which saves the imports."""

    def run(*args: Any, **kwargs: Any) -> Run:
        made = new_job(*args, **kwargs)
        with mock.patch.dict(os.environ):
            assert main([str(made.path)]) == 0
        return made

    return run


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """Megatron sets NVTE_ variables when it makes a model, and those count as versions of a program that is started later."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def child_environment() -> dict[str, str]:
    return _child_environment()


def _child_environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="session")
def train_on_two() -> Callable[[list[Run | tuple[Run, ...]]], None]:
    """Run jobs of two processes, one after the other, on the same two ranks; those of a tuple as in a resident program."""
    return lambda runs: _train_on(2, runs)


@pytest.fixture(scope="session")
def train_on_two_unequal() -> Callable[[list[Run | tuple[Run, ...]]], None]:
    """The same, by ranks that differ after each step in what both hold."""
    return lambda runs: _train_on(2, runs, "unequal_ranks.py")


@pytest.fixture(scope="session")
def train_on_four() -> Callable[[list[Run | tuple[Run, ...]]], None]:
    return lambda runs: _train_on(4, runs)


def _train_on(num_ranks: int, runs: list[Run | tuple[Run, ...]], script: str = "run_jobs.py") -> None:
    paths = [",".join(str(each.path) for each in (made if isinstance(made, tuple) else (made,))) for made in runs]
    jobs = [f"{port}:{path}" for port, path in zip(_free_ports(len(runs)), paths, strict=True)]
    command = [sys.executable, str(Path(__file__).with_name(script))]
    ranks = [
        subprocess.Popen([*command, str(rank), str(num_ranks), *jobs], env=_child_environment(), cwd=ROOT)
        for rank in range(num_ranks)
    ]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0] * num_ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _free_ports(count: int) -> Iterator[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    yield from ports


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[Run], str]:
    """Run a job that must fail in this process: gives its error line, after making sure that nothing was written."""

    def run(made: Run, *, code: int = 2) -> str:
        before = made.written()
        capsys.readouterr()  # transformers draws progress bars on stderr when it makes a model
        assert main([str(made.path)]) == code
        assert made.written() == before
        message = capsys.readouterr().err
        assert message.startswith("error: ")
        assert message.count("\n") == 1
        return message

    return run


@pytest.fixture
def as_one_file() -> Callable[[Path], Path]:
    """Make an adapter's optimizer state what an earlier version of Ratchet wrote."""

    def join(folder: Path) -> Path:
        tensors = {f"{which}.{name}": t for which, path in MOMENTS.items() for name, t in load_file(folder / path).items()}
        save_file(tensors, folder / "state/optimizer.safetensors", {"num_optimizer_steps": str(num_steps(folder))})
        for path in MOMENTS.values():
            (folder / path).unlink()
        return folder / "state/optimizer.safetensors"

    return join


@pytest.fixture
def edit_json() -> Callable[..., None]:
    def edit(path: Path, **changes: Any) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit
