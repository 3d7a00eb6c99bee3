"""An adapter's or optimizer's file, its digest and its way to the disk: by safetensors and a reader, and by our safetensors writer.

    python tests/benches/tensor_file.py FOLDER [--megabytes 320] [--repeat 5] [--busy-s 0.3]
    python tests/benches/tensor_file.py FOLDER --at-once 323 --at-once 161.5 161.5      # one file against two beside each other
    python tests/benches/tensor_file.py FOLDER --write-out 1500     # two files, a commit 1.2 s later, and another file meanwhile
    python tests/benches/tensor_file.py FOLDER --experts 12         # [--files 3]: of experts' adapters, sorted by name and as they lie in memory

Medians, in turns; FOLDER decides which disk. Ours also with tensors that lie one after the other in one memory, as the
trainer's do. Beside each one a thread keeps Python busy for --busy-s, as the launching of kernels does.
"""

import argparse
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from infra.megatron.checkpoint import safetensors_writer
from infra.megatron.checkpoint.safetensors_writer import Body
from infra.store import digests, files

NUM_TENSORS = 392
"""Of a 7B adapter."""
NUM_EXPERTS = 128
EXPERT = {"gate_proj": ((8, 2048), (768, 8)), "up_proj": ((8, 2048), (768, 8)), "down_proj": ((8, 768), (2048, 8))}
"""Adapters of an expert of 30B-A3B, rank 8: shapes of A and B."""
LOADED_AFTER_S = 1.2
"""Time between the files and their commit, in which the engine loads the adapter."""


def by_library(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Written, then read for the digest while it goes to the disk."""
    save_file(tensors, path, {"format": "pt"})
    with ThreadPoolExecutor(1) as hasher:
        sha256 = hasher.submit(digests.sha256_in, path.open("rb"))
        files.sync(path)
        return sha256.result()


def by_ours(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    return again(path, safetensors_writer.body_of(tensors))


def again(path: Path, body: Body) -> str:
    """As a trainer that stays does it, and then the step's commit."""
    sha256 = safetensors_writer.write(path, body, {"format": "pt"})
    files.sync(path)
    return sha256


def seconds_at_once(folder: Path, files_of: list[list[torch.Tensor]]) -> float:
    """Until all are on the disk, by ours; one thread a file, as infra.megatron.checkpoint.save has it."""
    paths = [folder / f"bench-{number}.safetensors" for number in range(len(files_of))]
    bodies = [safetensors_writer.body_of({f"layer.{number:03}": row for number, row in enumerate(rows)}) for rows in files_of]
    begin = time.perf_counter()
    with ThreadPoolExecutor() as writers:
        list(writers.map(again, paths, bodies))
    seconds = time.perf_counter() - begin
    for path in paths:
        path.unlink()
    return seconds


def compare_at_once(folder: Path, choices: list[list[float]], repeat: int) -> None:
    """In turns; of one memory each."""
    made = [[list(torch.randn(NUM_TENSORS, int(size * 1e6) // 4 // NUM_TENSORS)) for size in sizes] for sizes in choices]
    seconds: list[list[float]] = [[] for _ in choices]
    for _ in range(repeat):
        for files_of, measured in zip(made, seconds, strict=True):
            measured.append(seconds_at_once(folder, files_of))
    for sizes, measured in zip(choices, seconds, strict=True):
        print(
            f"{' + '.join(f'{size:g}' for size in sizes)} MB: {median(measured):.3f} s ({min(measured):.3f} to {max(measured):.3f})"
        )
    print("load", *os.getloadavg())


def compare_write_out(folder: Path, megabytes: int, repeat: int) -> None:
    """Print how long files and commit take with and without hints to the kernel while the files are written; both in turns."""
    paths = [folder / f"bench-{number}.safetensors" for number in range(2)]
    rows = torch.randn(2, NUM_TENSORS, megabytes * 10**6 // 4 // NUM_TENSORS)
    bodies = [safetensors_writer.body_of({f"layer.{number:03}": row for number, row in enumerate(memory)}) for memory in rows]
    found: dict[str, list[tuple[float, float, float]]] = {"from the beginning on": [], "at the commit": []}
    usual = safetensors_writer.WRITE_OUT_EVERY
    for _ in range(repeat):
        for name, every in (("from the beginning on", usual), ("at the commit", 1 << 60)):
            safetensors_writer.WRITE_OUT_EVERY = every
            begin = time.perf_counter()
            with ThreadPoolExecutor() as writers:
                list(writers.map(lambda path, body: safetensors_writer.write(path, body, {}), paths, bodies))
            written_s = time.perf_counter() - begin
            time.sleep(LOADED_AFTER_S)
            found[name].append((written_s, *synced(folder, paths)))
            for path in paths:
                path.unlink()
    for name, measured in found.items():
        written, synced_s, other = (
            f"{median(values):.2f} s ({min(values):.2f} to {max(values):.2f})" for values in zip(*measured, strict=True)
        )
        print(f"written to the disk {name}: files made in {written}, synced in {synced_s}, longest other write {other}")


def compare_order(folder: Path, num_layers: int, num_files: int, repeat: int) -> None:
    """Print how long files beside each other take, adapters of rank 8 on 128 experts a layer in the shape of 30B-A3B; both orders in turns."""
    paths = [folder / f"bench-{number}.safetensors" for number in range(num_files)]
    sizes = {f"{name}.lora_{which}": size for name, pair in EXPERT.items() for which, size in zip("AB", pair, strict=True)}
    memory = [torch.randn(num_layers, NUM_EXPERTS * sum(a * b for a, b in sizes.values())) for _ in paths]
    found: dict[str, list[float]] = {"sorted by name": [], "in the order of memory": []}
    bodies = {
        name: [safetensors_writer.body_of(of_experts(each, sizes), in_order=name != "sorted by name") for each in memory]
        for name in found
    }
    for _ in range(repeat):
        for name, measured in found.items():
            begin = time.perf_counter()
            with ThreadPoolExecutor() as writers:
                list(writers.map(lambda path, body: safetensors_writer.write(path, body, {}), paths, bodies[name]))
            measured.append(time.perf_counter() - begin)
            for path in paths:
                path.unlink()
    for name, measured in found.items():
        num_parts = len(bodies[name][0].parts)
        print(f"{name}: {median(measured):.2f} s ({min(measured):.2f} to {max(measured):.2f}), {num_parts} parts a file")


def of_experts(layers: torch.Tensor, sizes: dict[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """One tensor for each expert, as PEFT has them; those of all experts lie together."""
    found: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(layers):
        for name, stacked in zip(sizes, layer.split([NUM_EXPERTS * a * b for a, b in sizes.values()]), strict=True):
            rows = stacked.view(NUM_EXPERTS, *sizes[name])
            found |= {f"layers.{number}.experts.{expert}.{name}": row for expert, row in enumerate(rows)}
    return found


def synced(folder: Path, paths: list[Path]) -> tuple[float, float]:
    """Seconds until the files are synced, and the longest that a small file beside them took meanwhile."""
    other, longest, is_done = folder / "other", 0.0, threading.Event()

    def write_small() -> None:
        nonlocal longest
        while not is_done.wait(0.01):
            begin = time.perf_counter()
            other.write_bytes(b"small")
            files.sync(other)
            longest = max(longest, time.perf_counter() - begin)

    with ThreadPoolExecutor(1) as beside:
        beside.submit(write_small)
        begin = time.perf_counter()
        for path in paths:
            files.sync(path)
        seconds = time.perf_counter() - begin
        is_done.set()
    other.unlink(missing_ok=True)
    return seconds, longest


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=320)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--busy-s", type=float, default=0.0)
    parser.add_argument("--at-once", type=float, nargs="+", action="append", metavar="MEGABYTES", help="sizes of files")
    parser.add_argument("--write-out", type=int, metavar="MEGABYTES", help="size of each of two files")
    parser.add_argument("--experts", type=int, metavar="LAYERS", help="layers with adapters on experts; 30B-A3B has 48")
    parser.add_argument("--files", type=int, default=3, help="of --experts; a trainer writes three, one a core and more")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.at_once:
        compare_at_once(options.folder, options.at_once, options.repeat)
        return
    if options.write_out:
        compare_write_out(options.folder, options.write_out, options.repeat)
        return
    if options.experts:
        compare_order(options.folder, options.experts, options.files, options.repeat)
        return
    length = options.megabytes * 10**6 // 4 // NUM_TENSORS
    memory = torch.randn(NUM_TENSORS, length)
    together = {f"layer.{number:03}": row for number, row in enumerate(memory)}
    apart = {name: row.clone() for name, row in together.items()}
    ways = {"library": (by_library, apart), "apart": (by_ours, apart), "together": (by_ours, together)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    said = set()
    for _ in range(options.repeat):
        for name, (write, tensors) in ways.items():
            path = options.folder / "bench.safetensors"
            begin = time.perf_counter()
            with ThreadPoolExecutor(1) as in_background:
                in_background.submit(busy, options.busy_s)
                said.add(write(path, tensors))
                seconds[name].append(time.perf_counter() - begin)
            path.unlink()
    assert len(said) == 1, "other bytes"
    library, apart_s, together_s = (median(values) for values in seconds.values())
    print(f"safetensors, then the digest: {library:.3f} s; in one go: {apart_s:.3f} s; of one memory: {together_s:.3f} s")


if __name__ == "__main__":
    main()
