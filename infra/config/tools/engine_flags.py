"""Flags of the engines' command lines that Ratchet sets itself, and how one of them is known in engine.extra_flags, however it is spelt.

infra/setup/locks/flags/<engine>-<version>.json    every option of a locked version with its destination, made by infra/setup/locks/read_flags.py
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

TABLES = Path(__file__).parents[2] / "setup/locks/flags"
SAMPLED = "the trainer computes the whole distribution at sampling.temperature, so nothing else may be sampled from"
SPREAD = "engine.tensor_parallel is how an engine is spread over GPUs"
OURS: dict[str, dict[str, str]] = {
    "sglang": {
        **dict.fromkeys(("host", "port"), "set RATCHET_HOST and RATCHET_ENGINE_PORT"),
        **dict.fromkeys(("api_key", "admin_api_key"), "each launch has a key of its own"),
        "config": "a file would hide flags",
        "model_path": "set model",
        "skip_tokenizer_init": "Ratchet sends and takes token ids",
        "dtype": "set engine.dtype",
        "quantization": "set engine.quantization",
        "kv_cache_dtype": "set engine.kv_cache_dtype",
        "random_seed": "it is of run, step and launch",
        "preferred_sampling_params": SAMPLED,
        "context_length": "set engine.max_context_tokens",
        "max_running_requests": "set engine.max_running_requests",
        **dict.fromkeys(
            ("tp_size", "dp_size", "pp_size", "nnodes", "node_rank", "base_gpu_id", "gpu_id_step", "dist_init_addr"), SPREAD
        ),
        "enable_lora": "set engine.lora_mode",
        "max_lora_rank": "set engine.max_lora_rank",
        "lora_target_modules": "set trainer.lora.target_modules",
        **dict.fromkeys(("max_loras_per_batch", "max_loaded_loras"), "adapters are loaded and unloaded by the step"),
        "lora_strict_loading": "Ratchet relies on it",
        "device": "the machine decides it",
        "max_total_tokens": "set engine.kv_cache_tokens",
        "mem_fraction_static": "set engine.memory_fraction",
        **dict.fromkeys(("enable_memory_saver", "enable_weights_cpu_backup"), "set engine.colocation"),
        "enable_deterministic_inference": "set engine.deterministic",
        **dict.fromkeys(("enable_metrics", "log_level_http", "sleep_on_idle"), "Ratchet relies on its value"),
    },
    "vllm": {
        **dict.fromkeys(("host", "port"), "set RATCHET_HOST and RATCHET_ENGINE_PORT"),
        "api_key": "each launch has a key of its own",
        "config": "a file would hide flags",
        **dict.fromkeys(("model", "model_tag"), "set model"),
        "served_model_name": "adapters are asked for by names of Ratchet's",
        "dtype": "set engine.dtype",
        "seed": "requests have seeds of their own",
        **dict.fromkeys(("override_generation_config", "logits_processors"), SAMPLED),
        "max_model_len": "set engine.max_context_tokens",
        "max_num_seqs": "set engine.max_running_requests",
        **dict.fromkeys(("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "nnodes", "node_rank"), SPREAD),
        "gpu_memory_utilization": "set engine.memory_fraction",
        "enable_lora": "set engine.lora_mode",
        "max_lora_rank": "set engine.max_lora_rank",
        **dict.fromkeys(("max_loras", "max_cpu_loras"), "adapters are loaded and unloaded by the step"),
        "enable_sleep_mode": "set engine.colocation",
        **dict.fromkeys(
            (
                "generation_config",
                "logprobs_mode",
                "enable_prefix_caching",
                "enable_prompt_tokens_details",
                "disable_uvicorn_access_log",
            ),
            "Ratchet relies on its value",
        ),
    },
}
"""By engine and destination: what to do instead."""


def check(kind: str, flags: Sequence[str]) -> None:
    """Refuse flags that Ratchet sets itself: under any alias, abbreviated, with `=`, negated, with underscores.

    kind: Of the engine; a scripted one takes SGLang's.

    Raises:
        ValueError: names the first such flag, and what to set instead.
    """
    ours = OURS.get(kind, OURS["sglang"])
    for flag in flags:
        for destination in sorted(destinations(kind, flag)):
            if destination in ours:
                raise ValueError(f"extra_flags {flag!r} is {destination} of the engine, which Ratchet sets: {ours[destination]}")


def destinations(kind: str, word: str) -> set[str]:
    """Return the destinations that a word of a command line may mean: one, several for an ambiguous abbreviation, none for a value."""
    if not word.startswith("-") or word.lstrip("-")[:1].isdigit():
        return set()
    dashes = word[: len(word) - len(word.lstrip("-"))]
    name = dashes + word.lstrip("-").partition("=")[0].partition(".")[0].replace("_", "-")
    spellings = {name, f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name}
    options = table(kind)
    if exact := {options[spelling] for spelling in spellings if spelling in options}:
        return exact
    return {destination for option, destination in options.items() for spelling in spellings if option.startswith(spelling)}


def names_one_of(kind: str, flags: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether some flag means one of these destinations, and no other."""
    return any({*wanted} >= found for flag in flags if (found := destinations(kind, flag)))


@cache
def table(kind: str) -> dict[str, str]:
    """Return all options of an engine's locked versions, with their destinations."""
    found: dict[str, str] = {}
    for path in sorted(TABLES.glob(f"{kind if kind in OURS else 'sglang'}-*.json")):
        found |= json.loads(path.read_bytes())
    return found
