"""Flags that Ratchet sets are refused in engine.extra_flags, however they are spelt."""

import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from infra.colocation import plans
from infra.config import EngineConfig
from infra.config.tools import engine_flags
from infra.engines.sglang.engine import SGLangEngine
from infra.engines.vllm import engine as vllm
from infra.engines.vllm.engine import VLLMEngine
from infra.machine import devices
from infra.machine.devices import Plan
from infra.models import base_model
from infra.records import BaseModelRef
from infra.settings import CHECKOUT, settings

REPLACEABLE = ("attention_backend", "chunked_prefill_size", "cuda_graph_bs_decode", "cuda_graph_max_bs_decode", "lora_backend")
"""Destinations for which Ratchet has a choice that engine.extra_flags may replace: of two, the last one counts."""
SGLANG = [
    ("--tp-size", "engine.tensor_parallel"),
    ("--tp-size=8", "engine.tensor_parallel"),
    ("--tensor-parallel-size", "engine.tensor_parallel"),
    ("--tensor-par", "engine.tensor_parallel"),
    ("--tp", "engine.tensor_parallel"),
    ("--dp-size", "engine.tensor_parallel"),
    ("--mem-fraction-static", "engine.memory_fraction"),
    ("--mem-frac=0.99", "engine.memory_fraction"),
    ("--dtype", "engine.dtype"),
    ("--context-length", "engine.max_context_tokens"),
    ("--max-running", "engine.max_running_requests"),
    ("--enable-memory-saver", "engine.colocation"),
    ("--enable-deterministic-inference", "engine.deterministic"),
    ("--model", "set model"),
    ("--preferred-sampling-params", "sampling.temperature"),
    ("--hos", "RATCHET_HOST"),
]
VLLM = [
    ("-tp", "engine.tensor_parallel"),
    ("-tp=2", "engine.tensor_parallel"),
    ("--tensor_parallel_size", "engine.tensor_parallel"),
    ("--tensor-parallel-size=2", "engine.tensor_parallel"),
    ("--pipeline-parallel-size", "engine.tensor_parallel"),
    ("--gpu-memory-util", "engine.memory_fraction"),
    ("--max-model-len", "engine.max_context_tokens"),
    ("--no-enable-prefix-caching", "relies on its value"),
    ("--enable-sleep-mode", "engine.colocation"),
    ("--api-key=x", "key of its own"),
    ("--override-generation-config", "sampling.temperature"),
    ("--override-generation-config.top_k=20", "sampling.temperature"),
    ("--logits-processors", "sampling.temperature"),
]


@pytest.mark.parametrize(("kind", "flag", "field"), [*(("sglang", *row) for row in SGLANG), *(("vllm", *row) for row in VLLM)])
def test_a_flag_that_ratchet_sets_is_refused_with_the_field_s_name(kind: Any, flag: str, field: str) -> None:
    with pytest.raises(ValidationError, match=f"extra_flags '{re.escape(flag)}' is .*which Ratchet sets: .*{re.escape(field)}"):
        EngineConfig(kind=kind, extra_flags=(flag, "8"))


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("sglang", ("--attention-backend", "fa3", "--sampling-backend", "pytorch", "--cuda-graph-max-bs-decode", "128")),
        ("sglang", ("--lora-backend", "csgmv", "--schedule-policy", "lpm", "--mm-feature-transport", "cpu")),
        ("sglang", ("--chunked-prefill-size", "-1", "--trust-remote-code")),
        ("vllm", ("--enforce-eager", "--attention-backend", "FLASH_ATTN")),
    ],
)
def test_other_flags_are_free(kind: Any, flags: tuple[str, ...]) -> None:
    assert EngineConfig(kind=kind, extra_flags=flags).extra_flags == flags


def test_the_table_is_that_of_the_installed_sglang() -> None:
    """Read from SGLang's own parser, in its own environment."""
    script = CHECKOUT / "infra/setup/locks/read_flags.py"
    command = [str(settings().sglang_python), str(script), "sglang"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (version,) = re.findall(r"^sglang==(.*)$", (CHECKOUT / "infra/setup/locks/sglang-cpu.txt").read_text(), re.M)
    assert json.loads(done.stdout) == json.loads((engine_flags.TABLES / f"sglang-{version}.json").read_bytes())


def test_there_is_a_table_for_each_version_in_the_locks() -> None:
    locked = {
        f"{name}-{version}.json"
        for lock in (CHECKOUT / "infra/setup/locks").glob("*.txt")
        for name, version in re.findall(r"^(sglang|vllm)==(\S+)", lock.read_text(), re.M)
    }
    assert {path.name for path in engine_flags.TABLES.iterdir()} == locked


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("plan", ["keep_weights", "offload", "reload", "restart", "separate_gpus"])
def test_every_flag_that_we_can_emit_is_ours_or_replaceable(
    device: str, plan: Any, model_folder: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "device", lambda: device)
    monkeypatch.setattr(plans, "plan", lambda *_: Plan(plan, "a test"))
    monkeypatch.setattr(devices, "plan", lambda *_: Plan(plan, "a test"))
    monkeypatch.setattr(vllm, "check_plan", lambda *_: None)
    monkeypatch.setattr(vllm, "installed", lambda *_: None)
    base, targets = BaseModelRef(id=str(model_folder), sha256="0"), ("q_proj",)
    assert base_model.locate(base.id) == model_folder
    for serve, deterministic in itertools.product(("adapter", "merged"), (True, False)):
        config = EngineConfig(lora_mode=serve, deterministic=deterministic, kv_cache_tokens=4096)
        engine = SGLangEngine(config, base, targets)
        argv, _ = engine._command(30000)
        assert [word for word in argv if not _is_known("sglang", word)] == []
    emitted = VLLMEngine(EngineConfig(kind="vllm"), base, targets).arguments
    assert [word for word in emitted if not _is_known("vllm", word)] == []


def _is_known(kind: str, word: str) -> bool:
    found = engine_flags.destinations(kind, word)
    return not found or (len(found) == 1 and found <= {*engine_flags.OURS[kind], *REPLACEABLE})
