"""An adapter's or optimizer's file, its digest and its way to the disk: by safetensors and a reader, and by infra/megatron/tensor_file.py.

    python tests/benches/tensor_file.py FOLDER [--megabytes 320] [--repeat 5]

Medians of both, in turns, and their ratio; FOLDER decides which disk.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from infra import digests, files
from infra.megatron import tensor_file

NUM_TENSORS = 392
"""Of a 7B adapter."""


def by_library(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Written, then read for the digest while it goes to the disk."""
    save_file(tensors, path, {"format": "pt"})
    with ThreadPoolExecutor(1) as hasher:
        sha256 = hasher.submit(digests.sha256_in, path.open("rb"))
        files.sync(path)
        return sha256.result()


def by_ours(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    sha256 = tensor_file.write(path, tensors, {"format": "pt"})
    files.sync(path)
    return sha256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=320)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    length = options.megabytes * 10**6 // 4 // NUM_TENSORS
    tensors = {f"layer.{number}": torch.randn(length) for number in range(NUM_TENSORS)}
    seconds: dict[str, list[float]] = {"by_library": [], "by_ours": []}
    said = set()
    for _ in range(options.repeat):
        for write in (by_library, by_ours):
            path = options.folder / "bench.safetensors"
            begin = time.perf_counter()
            said.add(write(path, tensors))
            seconds[write.__name__].append(time.perf_counter() - begin)
            path.unlink()
    assert len(said) == 1, "other bytes"
    library, ours = (median(values) for values in seconds.values())
    print(f"safetensors, then the digest: {library:.3f} s; in one go: {ours:.3f} s; {library / ours:.2f} times")


if __name__ == "__main__":
    main()
