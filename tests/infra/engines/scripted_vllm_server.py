"""vLLM's twin: its HTTP without a model. It behaves as the source of vLLM 0.26.0 says, its ways of failing included:

* an adapter that is not loaded is 404, one that is loaded already 400; unloading forgets a name and nothing else;
* asleep it takes requests and does not answer them; a second sleep, or a wake with a tag that is awake, is 200 and does nothing;
* after sleep level 2 and a wake without reload_weights it answers garbage, with 200;
* reload_weights with LoRA on is HTTP 500, as before 0.28.0, unless the fault file says `reloads under LoRA`;
* NaN is HTTP 400, or null in a stream; an error within a stream comes with 200.

Faults besides scripted_server.py's: `does not sleep`, `does not wake` (200, and nothing happens), `aborts the stream`, `does not release`
(it sleeps, and its memory stays in use), `frees a little`, `smaller cache` after a wake. `<fault file>.memory`: the GPU memory in GiB that the
driver counts for it in tests.
`RATCHET_TWIN_MIB` is host memory that it holds while it is awake, `RATCHET_TWIN_TOKEN_S` what a token of a stream takes: the twin
is not vLLM, and no figure of it says anything about vLLM.
"""

import math
import os
import threading
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from scripted_server import Asked, Handler, adapters, complete, ever_loaded, fault, num_requests, prompt_logprobs, serve

BASE = "base"
TAGS = {"weights", "kv_cache"}
sleeping: set[str] = set()
awake = threading.Event()
awake.set()
has_weights = threading.Event()
has_weights.set()
held: list[bytearray] = []
AWAKE_GIB, ASLEEP_GIB = 100.0, 2.0
cache = {"tokens": 4096}


def remember_memory(gib: float = AWAKE_GIB) -> None:
    if "RATCHET_TEST_FAULT" in os.environ:
        Path(os.environ["RATCHET_TEST_FAULT"] + ".memory").write_text(str(gib))


def hold() -> None:
    held[:] = [bytearray(os.urandom(1024) * 1024 * int(os.environ.get("RATCHET_TWIN_MIB", "0")))]


def asked_in(body: dict) -> Asked:
    return Asked(
        tokens=body["prompt"],
        adapter=None if body["model"] == BASE else body["model"],
        seed=body.get("seed"),
        max_new_tokens=body["max_tokens"],
        ignore_eos="seed" in body and body.get("ignore_eos", False),
        reads_cache="prompt_logprobs" not in body,
        cache_key=body.get("cache_salt"),
    )


class VLLM(Handler):
    open_paths = ("/never",)  # the launcher guards everything
    completion_path = "/v1/completions"

    def asked(self, body: dict) -> Asked:
        return asked_in(body)

    def get(self) -> None:
        match self.path:
            case "/metrics":
                tokens = cache["tokens"]  # a rest of each last block is lost
                info = f'block_size="16",num_gpu_blocks="258",kv_cache_size_tokens="{tokens}",engine="0"'
                self.answer(200, f"vllm:cache_config_info{{{info}}} 1.0\n")
            case "/version":
                self.answer(200, {"version": "0.26.0 (scripted twin, not vLLM)"})
            case "/is_sleeping":
                self.answer(200, {"is_sleeping": bool(sleeping)})
            case _:
                self.answer(200, "")

    def post(self, body: dict) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        match url.path:
            case "/v1/load_lora_adapter":
                self.load(body)
            case "/v1/unload_lora_adapter":
                if adapters.pop(body["lora_name"], None) is None:
                    self.error(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
                else:
                    self.answer(200, "Success")
            case "/sleep":
                self.sleep(int(query["level"][0]))
            case "/wake_up":
                self.wake_up(set(query.get("tags", TAGS)))
            case "/collective_rpc" if body["method"] == "reload_weights":
                self.reload_weights()
            case "/v1/completions":
                self.completions(body)
            case "/abort_requests":
                num_requests["aborted"] += 1
                self.answer(200, {"status": "aborted"})
            case _:
                self.answer(404, "")

    def error(self, status: int, message: str) -> None:
        self.answer(status, {"error": {"message": message, "type": "Error", "code": status}})

    def load(self, body: dict) -> None:
        if body["lora_name"] in adapters:
            self.error(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
            return
        adapters[body["lora_name"]] = body["lora_path"]
        ever_loaded.append(body["lora_path"])
        self.answer(200, f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    def sleep(self, level: int) -> None:
        if not sleeping and fault() != "does not sleep":
            sleeping.update(TAGS)
            awake.clear()
            held.clear()
            remember_memory({"does not release": AWAKE_GIB, "frees a little": AWAKE_GIB - 1}.get(fault(), ASLEEP_GIB))
            if level == 2:
                has_weights.clear()
        self.answer(200, "")

    def wake_up(self, tags: set[str]) -> None:
        if tags <= sleeping and fault() != "does not wake":
            sleeping.difference_update(tags)
            if not sleeping:
                hold()
                remember_memory()
                cache["tokens"] -= 100 if fault() == "smaller cache" else 0
                awake.set()
        self.answer(200, "")

    def reload_weights(self) -> None:
        if fault() != "reloads under LoRA":
            self.error(500, "KeyError: 'layers.0.mlp.gate_up_proj.weight'")
            return
        has_weights.set()
        self.answer(200, {"results": [None]})

    def completions(self, body: dict) -> None:
        awake.wait()
        asked, off = asked_in(body), 0.0 if has_weights.is_set() else 5.0
        if asked.adapter is not None and asked.adapter not in adapters:
            self.error(404, f"The model `{asked.adapter}` does not exist.")
            return
        known = None
        if not asked.reads_cache:
            pairs = zip(asked.tokens[1:], prompt_logprobs(asked.tokens, asked.adapter, off), strict=True)
            known = [None, *({str(t): {"logprob": v, "rank": 1, "decoded_token": "?"}} for t, v in pairs)]
        said = complete(asked, off)
        usage = {"prompt_tokens_details": {"cached_tokens": len(asked.tokens) - 1}}
        if said is None:
            self.answer(200, {"choices": [], "usage": usage})
        elif body.get("stream"):
            self.in_chunks(said.tokens, said.logprobs, said.finish_reason, usage)
        elif any(value is not None and math.isnan(value) for value in said.logprobs):
            self.error(400, "Out of range float values are not JSON compliant: nan")
        else:
            choice = {"index": 0, "text": "?", "token_ids": said.tokens, "finish_reason": said.finish_reason}
            choice |= {"logprobs": {"token_logprobs": said.logprobs}, "prompt_logprobs": known}
            self.answer(200, {"choices": [choice], "usage": usage})

    def in_chunks(self, tokens: list[int], logprobs: list[float | None], reason: str, usage: dict) -> None:
        clean = [None if value is None or math.isnan(value) else value for value in logprobs]
        chunks: list[object] = [
            {
                "choices": [
                    {
                        "index": 0,
                        "token_ids": [token],
                        "logprobs": {"token_logprobs": clean[n : n + 1]},
                        "finish_reason": reason if n == len(tokens) - 1 else None,
                    }
                ]
            }
            for n, token in enumerate(tokens)
        ]
        chunks.append({"choices": [], "usage": usage})
        if fault() == "aborts the stream":
            chunks[1:] = [{"error": {"message": "EngineCore encountered an issue.", "code": 500}}]
        self.stream(chunks, float(os.environ.get("RATCHET_TWIN_TOKEN_S", "0")))


if __name__ == "__main__":
    print("scripted twin: this is not vLLM", flush=True)
    print(
        "INFO 11-24 10:00:00 [cuda.py:317] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
        flush=True,
    )
    print("INFO 11-24 10:00:00 [punica_selector.py:20] Using PunicaWrapperGPU.", flush=True)
    hold()
    serve(VLLM, remember_memory)
