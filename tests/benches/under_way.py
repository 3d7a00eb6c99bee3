"""What the copies of a step under way send to a store, against the size of its journal.

    .venv/bin/python tests/benches/under_way.py FOLDER [--samples 4096 65536] [--tokens 256] [--copies 10]

A journal of random tokens and log-probabilities grows in equal portions, with a copy to a folder after each: a step of ten minutes with
RATCHET_STORE_EVERY_S=60. CPU and wall seconds are those of all copies.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path

from infra.engines.journal import Journal
from infra.mirror.remote import Remote
from infra.mirror.under_way import copy_under_way
from infra.settings import settings
from infra.store.files import new_id, write_json
from infra.store.layout import RunFolder, StepFolder, run_folder
from infra.store.samples import Sample

VOCAB_SIZE = 150_000
GROUP_SIZE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes that copies of a step under way send.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, nargs="+", default=[4096, 65536])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--copies", type=int, default=10)
    options = parser.parse_args()
    for num_samples in options.samples:
        print(json.dumps(measured(options.folder / str(num_samples), num_samples, options.tokens, options.copies)))


def measured(folder: Path, num_samples: int, num_tokens: int, num_copies: int) -> dict[str, float]:
    os.environ["RATCHET_WORKSPACE"] = str(folder / "workspace")
    settings.cache_clear()
    sent, replace = list[int](), Remote.replace

    def counted(remote: Remote, name: str, data: bytes) -> None:
        sent.append(len(data))
        replace(remote, name, data)

    new_id(run_folder("r"))
    write_json(RunFolder.of("r").config, {"name": "r"})
    (folder / "store").mkdir(parents=True)
    remote, path, rng = Remote(str(folder / "store")), StepFolder.at("r", 0).journal, random.Random(1)
    path.parent.mkdir(parents=True)
    cpu_s, wall_s = 0.0, 0.0
    Remote.replace = counted  # type: ignore[method-assign]
    try:
        with Journal(path, {"adapter": "a"}) as journal:
            for copy in range(num_copies):
                for number in range(copy * num_samples // num_copies, (copy + 1) * num_samples // num_copies):
                    journal.add(sample_of(number, num_tokens, rng))
                begin, cpu_begin = time.perf_counter(), time.process_time()
                copy_under_way(remote, "r")
                wall_s, cpu_s = wall_s + time.perf_counter() - begin, cpu_s + time.process_time() - cpu_begin
    finally:
        Remote.replace = replace  # type: ignore[method-assign]
    size = path.stat().st_size
    found = {"samples": num_samples, "journal_mb": size / 1e6, "sent_mb": sum(sent) / 1e6, "sent_over_journal": sum(sent) / size}
    return {name: round(value, 2) for name, value in (found | {"cpu_s": cpu_s, "wall_s": wall_s}).items()}


def sample_of(number: int, num_tokens: int, rng: random.Random) -> Sample:
    return Sample(
        prompt_id=number // GROUP_SIZE,
        sample_index=number % GROUP_SIZE,
        prompt_tokens=[rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)],
        output_tokens=[rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)],
        output_logprobs=[-rng.random() for _ in range(num_tokens)],
        finish_reason="stop",
        adapter_version=0,
        adapter_sha256="a" * 64,
    )


if __name__ == "__main__":
    main()
