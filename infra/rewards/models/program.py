"""The program that holds a reward model: the only module of the rewards that imports torch. Nothing imports it.

    flow process --batches of token ids--> python -m infra.rewards.models.program REQUESTS RESULTS OWNER
    (scorer.py)  <--------scores---------- two inherited pipes; the pid of the flow process

First comes a ModelSpec: the model is read into host memory, which may be long before it is needed. Then comes {"place": true}: the model goes to
its device, answered by {"ready": ...} or {"failed": message}. Then come batches {"rows": [[id, ...], ...]}, each answered by
{"scores": [[number or null, reason, message], ...]} in order. The program ends with its pipe, and when its owner is gone.
"""

import contextlib
import json
import math
import os
import sys
import threading
import time
from typing import Any

from infra.rewards import frames
from infra.rewards.models.protocol import ModelSpec, Score
from infra.rewards.outcome import EXCEPTION, NO_NUMBER

POLL_S = 1.0
ALLOCATOR_SIGNS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
MAX_MESSAGE_CHARACTERS = 300


class CannotLoad(ValueError):
    """The folder holds no model that can be used."""


class Scorer:
    """A model that is loaded."""

    def __init__(self, spec: ModelSpec) -> None:
        """Raises CannotLoad, in one line, for a model that cannot be used."""
        import torch
        from transformers import AutoModelForSequenceClassification

        self.torch, self.spec = torch, spec
        torch.set_num_threads(spec.num_threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            model, found = AutoModelForSequenceClassification.from_pretrained(
                spec.folder,
                dtype=getattr(torch, spec.dtype),
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
            if missing := sorted(found["missing_keys"]):
                raise CannotLoad(f"its files have no {missing[0]}, which would be random: take a model that was trained to score")
            if spec.label >= (num := model.config.num_labels):
                raise CannotLoad(f"it has {num} outputs, and reward.model.label is {spec.label}: take 0 to {num - 1}")
            self.model: Any = model.eval()  # Any: transformers has no types here
        except CannotLoad:
            raise
        except Exception as error:
            raise CannotLoad(_said(error)) from error
        model.config.use_cache = False
        self.text_config: Any = model.config.get_text_config()
        self.pad: int | None = self.text_config.pad_token_id

    def place(self) -> None:
        """Take the model to its device. Until then the program has no context on a GPU and holds none of its memory."""
        try:
            self.model = self.model.to(self.spec.device)
        except Exception as error:
            raise CannotLoad(_said(error)) from error

    def size(self) -> dict[str, int]:
        parameters = list(self.model.parameters())
        return {
            "num_parameters": sum(each.numel() for each in parameters),
            "num_bytes": sum(each.numel() * each.element_size() for each in parameters),
        }

    def scores(self, rows: list[list[int]]) -> list[Score]:
        """Score rows of token ids. Rows that fail together are tried in halves, so that one costs no other."""
        try:
            return self._together(rows)
        except Exception as error:
            if self.spec.device == "cuda" and not _is_of_memory(error):
                raise  # after an error in a kernel the GPU's context is of no use any more: the program ends
            failed = _said(error)
        if len(rows) == 1:
            return [(None, EXCEPTION, f"its reward model raised {failed}")]
        if self.spec.device == "cuda":
            self.torch.cuda.empty_cache()
        half = len(rows) // 2
        return [*self.scores(rows[:half]), *self.scores(rows[half:])]

    def _together(self, rows: list[list[int]]) -> list[Score]:
        torch, longest = self.torch, max(map(len, rows))
        pad = self.pad if self.pad is not None else _absent(rows)
        self.text_config.pad_token_id = pad  # the model takes the last id that is no padding as a row's end
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=self.spec.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self.spec.device)
        with torch.inference_mode():
            logits = self.model(input_ids=ids, attention_mask=mask).logits
        values: list[float] = logits[:, self.spec.label].float().tolist()
        return [_score(value) for value in values]


def _score(value: float) -> Score:
    return (
        (value, "", "")
        if math.isfinite(value)
        else (None, NO_NUMBER, f"its reward model gave {value}, which is no finite number")
    )


def _absent(rows: list[list[int]]) -> int:
    """Return the smallest id that no row has, for a model without padding: a row alone gives the same number."""
    found = set().union(*map(set, rows))
    return next(number for number in range(len(found) + 1) if number not in found)


def _is_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in ALLOCATOR_SIGNS)


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_MESSAGE_CHARACTERS]


def _ends_with(owner: int) -> None:
    """End this process once its owner is gone, also while a batch hangs."""
    while os.getppid() == owner:
        time.sleep(POLL_S)
    os._exit(0)


def serve(requests: int, results: int) -> None:
    def send(content: dict[str, Any]) -> None:
        frames.write(results, json.dumps(content).encode())

    spec, failed = ModelSpec(**json.loads(frames.read(requests) or b"{}")), ""
    try:
        scorer = Scorer(spec)
    except CannotLoad as error:
        failed = str(error)
    if frames.read(requests) is None:
        return
    try:
        if not failed:
            scorer.place()
    except CannotLoad as error:
        failed = str(error)
    if failed:
        send({"failed": failed})
        return
    send({"ready": scorer.size()})
    while (request := frames.read(requests)) is not None:
        send({"scores": scorer.scores(json.loads(request)["rows"])})


def main() -> None:
    requests, results, owner = map(int, sys.argv[1:])
    for descriptor in (requests, results):
        os.set_inheritable(descriptor, False)
    threading.Thread(target=_ends_with, args=(owner,), daemon=True).start()
    with contextlib.suppress(BrokenPipeError):  # the flow process is gone
        serve(requests, results)


if __name__ == "__main__":
    main()
