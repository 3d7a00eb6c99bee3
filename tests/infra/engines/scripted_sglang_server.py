"""A server that speaks SGLang's HTTP without a model, for border tests; see scripted_server.py.

It asks for the API key as SGLang does: not for /health and /metrics, for everything else. It warms itself up as SGLang does: it answers
at once, with a request of its own under way, and only /health says when that is over.

Memory as SGLang has it: a release while requests are let in, or a resume without a release, ends it; weights that were released without
`--enable-weights-cpu-backup` are garbage until they are read from disk, and nothing says so. What it holds, in GiB, is in the file
`<fault file>.memory`: what the driver says of it in tests.
"""

import json
import os
import sys
import time
from functools import cache
from pathlib import Path

from scripted_server import (
    Asked,
    Handler,
    adapters,
    answered,
    broken_off,
    complete,
    computed_for,
    ever_loaded,
    fault,
    logprob,
    num_requests,
    prompt_logprobs,
    serve,
    weights,
)

GIB = {"kv_cache": 83, "weights": 15}
REST_GIB = 2
WARM_UP_S, BEGIN = 0.3, time.monotonic()
memory: dict = {"released": set(), "paused": False, "flushes": 0, "tokens": 65536}
weights["version"] = "default"


def is_warming_up() -> bool:
    return time.monotonic() - BEGIN < WARM_UP_S


def remember_memory() -> None:
    held = REST_GIB + sum(size for tag, size in GIB.items() if tag not in memory["released"])
    if "RATCHET_TEST_FAULT" in os.environ:
        Path(os.environ["RATCHET_TEST_FAULT"] + ".memory").write_text(str(held))


def manage_memory(path: str, body: dict) -> tuple[int, object] | None:
    """What SGLang does for a control request; None for another path."""
    match path:
        case "/pause_generation" | "/continue_generation":
            memory["paused"] = path == "/pause_generation"
        case "/abort_request":
            num_requests["aborted"] += body.get("abort_all", False)
            broken_off.update([body["rid"]] if "rid" in body else [])
        case "/flush_cache":
            memory["flushes"] += 1
            answered("flush", "order")
            if fault() == "busy" or (fault() == "busy at first" and memory["flushes"] < 4):
                return 400, "not idle"
        case "/release_memory_occupation":
            if not memory["paused"] or fault() == "busy":
                os._exit(1)
            if fault() != "does not release":
                memory["released"] |= set(body["tags"])
        case "/resume_memory_occupation":
            if not memory["released"] and fault() != "does not release":
                os._exit(1)
            if "weights" in memory["released"] and "--enable-weights-cpu-backup" not in sys.argv:
                weights["lost"] = True
            memory["released"] -= set(body["tags"])
            memory["tokens"] -= 100 if fault() == "smaller cache" else 0
        case "/update_weights_from_disk":
            if fault() == "cannot read":
                return 400, {"success": False}
            if fault() != "reads nothing":
                is_adapter = (Path(body["model_path"]) / "adapter_model.safetensors").exists()
                weights["lost"], weights["path"] = False, body["model_path"] if is_adapter else None
            weights["version"] = body["weight_version"]
        case _:
            return None
    remember_memory()
    what = [*body.get("tags", []), *(["all"] if body.get("abort_all") else [body["rid"]] if "rid" in body else [])]
    answered(" ".join([path, *what]), "control")
    return 200, {}


def asked_in(body: dict) -> Asked:
    sampling = body["sampling_params"]
    return Asked(
        tokens=body["input_ids"],
        adapter=body.get("lora_path"),
        seed=sampling.get("sampling_seed"),
        max_new_tokens=sampling["max_new_tokens"],
        ignore_eos="sampling_seed" in sampling and sampling.get("ignore_eos", False),
        reads_cache=body.get("logprob_start_len") != 0,
        cache_key=body.get("extra_key"),
        request_id=body.get("rid", ""),
    )


class SGLang(Handler):
    open_paths = ("/health", "/metrics")
    completion_path = "/generate"

    def asked(self, body: dict) -> Asked:
        return asked_in(body)

    def get(self) -> None:
        info = {"max_total_num_tokens": memory["tokens"], "version": "0.5.18 (scripted twin, not SGLang)"}
        info |= {"attention_backend": "torch_native", "lora_backend": "torch_native", "api_key": "not to be recorded"}
        if self.path == "/health" and is_warming_up():
            self.answer(503, "")
        elif self.path == "/metrics":
            self.answer(200, f'sglang:num_requests_total{{stream="false"}} {num_requests["generate"]}.0\n'.encode())
        else:
            self.answer(200, info)

    def post(self, body: dict) -> None:
        match self.path:
            case "/load_lora_adapter":
                adapters[body["lora_name"]] = body["lora_path"]
                ever_loaded.append(body["lora_path"])
                self.answer(200, {})
            case "/freeze_gc":
                answered(self.path, "collector")
                self.answer(200, {})
            case "/unload_lora_adapter":
                del adapters[body["lora_name"]]
                self.answer(200, {})
            case "/generate" if is_warming_up():
                self.answer(500, "asked during the warm-up")
            case "/generate":
                try:
                    self.generate(body)
                except KeyError as error:
                    self.answer(400, f"adapter {error} is not loaded")
            case _ if (said := manage_memory(self.path, body)) is not None:
                self.answer(*said)
            case _:
                self.answer(404, "")

    def generate(self, body: dict) -> None:
        if isinstance(body["input_ids"][0], list):
            self.answer(200, [reply(each) for each in one_by_one(body)])
            return
        said = reply(body)
        if not body.get("stream"):
            self.answer(200, said)
            return
        # As with --incremental-streaming-output: each chunk holds what is new.
        pairs = zip(said["output_ids"], said["meta_info"]["output_token_logprobs"], strict=True)
        self.stream(
            [{"output_ids": [token], "meta_info": said["meta_info"] | {"output_token_logprobs": [pair]}} for token, pair in pairs]
        )


def one_by_one(body: dict) -> list[dict]:
    """What many requests in one ask for; a field that is no list holds for all."""

    def of(number: int, field: str) -> object:
        return body[field][number] if isinstance(body[field], list) else body[field]

    return [{field: of(number, field) for field in body} for number in range(len(body["input_ids"]))]


def reply(body: dict) -> dict | list:
    asked, version = asked_in(body), "another" if fault() == "another weight version" else weights["version"]
    is_forgotten = fault() == "forgets prompts" and num_requests["answered"] % 2
    about: dict = {"cached_tokens": 0 if is_forgotten else len(asked.tokens) - 1, "weight_version": version}
    if (begin := body.get("logprob_start_len", -1)) >= 0:
        values = prompt_logprobs(asked.tokens, asked.adapter)
        if begin and fault() == "stale prefix cache":
            values = [logprob(asked.tokens[:n], computed_for[tuple(asked.tokens)]) for n in range(1, len(asked.tokens))]
        told = [token if token < vocab_size() - 1 else 0 for token in asked.tokens]  # as the real one does
        known = [[v, t, None] for v, t in zip(values, told[1:], strict=True)]
        about |= {"input_token_logprobs": [[None, told[begin], None], *known[begin:]]}
    said = complete(asked)
    if said is None:
        return []
    pairs = [[v, t, None] for v, t in zip(said.logprobs, said.tokens, strict=False)]
    about |= {"finish_reason": {"type": said.finish_reason}, "output_token_logprobs": pairs}
    return {"output_ids": said.tokens, "meta_info": about}


@cache
def vocab_size() -> int:
    folder = Path(sys.argv[sys.argv.index("--model-path") + 1])
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def compile_kernels() -> None:
    """What SGLang does in its start, as its log tells it: kernels that are in the cache are not compiled again."""
    stamp = time.strftime("[%Y-%m-%d %H:%M:%S]")
    print(f"{stamp} Init torch distributed begin.")
    name = f"{os.getpid()}" if fault() == "compiles again" else "kernel"
    kernel = Path(os.environ["TRITON_CACHE_DIR"]) / name / "kernel.cubin"
    kernel.parent.mkdir(parents=True, exist_ok=True)
    kernel.write_text("compiled")
    print(f"{stamp} Load weight end. elapsed=0.03 s, type=None, avail mem=1.00 GB, mem usage=1.00 GB.")
    for phase in ("decode", "prefill"):
        print(f"{stamp} Capture target {phase} CUDA graph end. elapsed=0.02 s, mem usage=1.00 GB, avail mem=1.00 GB.")


if __name__ == "__main__":
    compile_kernels()
    # SGLang's scheduler keeps such a file open, and leaves it behind.
    segment = open(f"/dev/shm/sglang_loads_scripted_{os.getpid()}.shm", "w")  # noqa: SIM115
    serve(SGLang, remember_memory)
