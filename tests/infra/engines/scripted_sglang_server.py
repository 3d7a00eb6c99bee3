"""A server that speaks SGLang's HTTP without a model, for border tests; see scripted_server.py.

It asks for the API key as SGLang does: not for /health and /metrics, for everything else.
"""

from scripted_server import Asked, Handler, adapters, complete, ever_loaded, num_requests, prompt_logprobs, serve


def asked_in(body: dict) -> Asked:
    sampling = body["sampling_params"]
    return Asked(
        tokens=body["input_ids"],
        adapter=body.get("lora_path"),
        seed=sampling.get("sampling_seed"),
        max_new_tokens=sampling["max_new_tokens"],
        ignore_eos="sampling_seed" in sampling and sampling.get("ignore_eos", False),
        reads_cache=body.get("logprob_start_len") != 0,
    )


class SGLang(Handler):
    open_paths = ("/health", "/metrics")
    completion_path = "/generate"

    def get(self) -> None:
        count = num_requests["generate"]
        metrics = f"sglang:time_to_first_token_seconds_sum 1.0\nsglang:time_to_first_token_seconds_count {count}\n"
        self.answer(200, metrics + "sglang:max_total_num_tokens 4096\n" if self.path == "/metrics" else {})

    def post(self, body: dict) -> None:
        match self.path:
            case "/load_lora_adapter":
                adapters[body["lora_name"]] = body["lora_path"]
                ever_loaded.append(body["lora_path"])
                self.answer(200, {})
            case "/unload_lora_adapter":
                del adapters[body["lora_name"]]
                self.answer(200, {})
            case "/generate":
                try:
                    self.generate(body)
                except KeyError as error:
                    self.answer(400, f"adapter {error} is not loaded")
            case _:
                self.answer(404, "")

    def generate(self, body: dict) -> None:
        asked, about = asked_in(body), {"cached_tokens": len(body["input_ids"]) - 1}
        if not asked.reads_cache:
            values = prompt_logprobs(asked.tokens, asked.adapter)
            known = [[v, t, None] for v, t in zip(values, asked.tokens[1:], strict=True)]
            about |= {"input_token_logprobs": [[None, asked.tokens[0], None], *known]}
        said = complete(asked)
        if said is None:
            self.answer(200, [])
            return
        pairs = [[v, t, None] for v, t in zip(said.logprobs, said.tokens, strict=False)]
        about |= {"finish_reason": {"type": said.finish_reason}}
        if not body.get("stream"):
            self.answer(200, {"output_ids": said.tokens, "meta_info": about | {"output_token_logprobs": pairs}})
            return
        # As with --incremental-streaming-output: each chunk holds what is new.
        self.stream(
            [
                {"output_ids": [token], "meta_info": about | {"output_token_logprobs": [pair]}}
                for token, pair in zip(said.tokens, pairs, strict=True)
            ]
        )


if __name__ == "__main__":
    serve(SGLang)
