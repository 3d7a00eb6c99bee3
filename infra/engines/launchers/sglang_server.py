"""Launch SGLang with its API key from a file: `RATCHET_API_KEY_FILE=... python sglang_server.py <flags of sglang.launch_server>`.

Runs in SGLang's own environment and imports nothing of ours. SGLang's own flag would show the key to everyone who can list
processes, and SGLang logs all its arguments when it starts. Seen with 0.5.18 (CPU) and in the source of 0.5.17 (GPU).
"""

import importlib.util
import logging
import os
import runpy
import sys
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def with_key(prepare: Callable[[list[str]], Any], key: str) -> Callable[[list[str]], Any]:
    """Wrap SGLang's parser of its command line so that it adds the key to the parsed arguments."""

    def prepared(argv: list[str]) -> Any:
        server_args = prepare(argv)
        object.__setattr__(server_args, "api_key", key)  # read-only by now in 0.5.18; nothing was derived from the key
        return server_args

    return prepared


def mark_warnings() -> None:
    """Have SGLang write the level of a warning or an error before its message: its own format has time and message only."""
    make = logging.getLogRecordFactory()

    def record_of(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.levelno >= logging.WARNING:
            record.msg = f"{record.levelname}: {record.msg}"
        return record

    logging.setLogRecordFactory(record_of)


def is_for_cpu(argv: list[str]) -> bool:
    """Whether --device is `cpu`. Other flags may have this value too."""
    return ("--device", "cpu") in pairwise(argv)


def has_own_kernels(argv: list[str]) -> bool:
    """Whether LoRA's products are computed by kernels of ours."""
    return not is_for_cpu(argv) and "--enable-deterministic-inference" not in argv


def is_further_node(argv: list[str]) -> bool:
    """Whether this is a node of an engine over several, but not the first."""
    return any(flag == "--node-rank" and rank != "0" for flag, rank in pairwise(argv))


def ended_with_its_ranks(launch: Callable[..., Any], end: Callable[[int], object] = os._exit) -> Callable[..., Any]:
    """Wrap `Engine._launch_subprocesses`, which returns on a further node when the ranks there have ended. SGLang 0.5.18 then starts an HTTP server,
    which fails, and the process stays. It ends instead."""

    def launched(*args: Any, **named: Any) -> None:
        launch(*args, **named)
        end(1)

    return launched


def load(name: str, folder: Path = HERE) -> Any:
    """Load a file of this folder by path, because the folder must not be on the import path."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# A script's own folder comes first in sys.path: `import megatron` in SGLang's environment would find ours.
sys.path[:] = [place for place in sys.path if Path(place).resolve() != HERE]
if __name__ in ("__main__", "__mp_main__"):
    mark_warnings()
if is_for_cpu(sys.argv):
    # Both also in every process that the server spawns.
    load("sglang_cpu")
    load("sglang_attention_patch").mend()
elif __name__ == "__main__":
    load("sglang_compile_ahead").start(sys.argv[1:])
if __name__ in ("__main__", "__mp_main__"):
    patch_after_import = load("after_import").patch_after_import
    adapters = cache(partial(load, "sglang_lora_patch"))  # one module for both patches
    patch_after_import("sglang.srt.lora.mem_pool", lambda module: adapters().mend_pool(module))
    patch_after_import("sglang.srt.lora.lora", lambda module: adapters().mend_adapter(module))
    decoding = partial(load, folder=HERE / "decoding")
    kernels = partial(decoding, "sglang_lora_kernels") if has_own_kernels(sys.argv) else None
    triton_backend = "sglang.srt.lora.backend.triton_backend"
    patch_after_import(triton_backend, lambda module: decoding("sglang_lora_decoding").mend(module, kernels))
    patch_after_import("sglang.srt.layers.sampler", lambda module: decoding("sglang_sampler_patch").mend(module))
    if folder := os.environ.get("RATCHET_SHARED_EXPERTS"):
        load("sglang_shared_experts").share(Path(folder), patch_after_import)

if __name__ == "__main__":
    from sglang.srt import server_args

    server_args.prepare_server_args = with_key(server_args.prepare_server_args, load("api_key").key())
    load("sglang_abort_patch").mend()
    if is_further_node(sys.argv):
        from sglang.srt.entrypoints.engine import Engine

        Engine._launch_subprocesses = staticmethod(ended_with_its_ranks(Engine._launch_subprocesses))
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
