"""The files of a mixture's adapter and moments, and the engine's copy of the adapter: rounded by the host, or by the device that sends it.

    python tests/gpu/export_speed.py OUT.json FOLDER [--layers 48] [--repeat 3]

The checkout and tests/benches on PYTHONPATH. Adapters of rank 8 on the 128 experts of each layer of 30B-A3B, as a trainer has them: values on the
device, copied into page-locked memory, three files of float32 and one of bfloat16, written and hashed beside each other. Both ways in turns, seconds
until all four are there. FOLDER decides which disk. 14 GB of memory for 48 layers. Without a GPU it shows that it works.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from infra.megatron.checkpoint import safetensors_writer
from infra.megatron.checkpoint.pinned_memory import HostMemory, Kind
from infra.megatron.checkpoint.safetensors_writer import Body
from infra.store.files import write_json

sys.path.insert(0, str(Path(__file__).parents[1] / "benches"))
import tensor_file

HOST, DEVICE = "rounded by the host", "rounded by the device"
FILES = ("weights", "exp_avg", "exp_avg_sq")


class Export:
    """The state of a trainer, on the device and on the host."""

    def __init__(self, num_layers: int, device: str) -> None:
        self.device = device
        shapes = {
            f"{name}.lora_{which}": size
            for name, pair in tensor_file.EXPERT.items()
            for which, size in zip("AB", pair, strict=True)
        }
        self.names = [f"layers.{layer:03}.experts.{name}" for layer in range(num_layers) for name in sorted(shapes)]
        sizes = [torch.Size((tensor_file.NUM_EXPERTS, *shapes[name.partition(".experts.")[2]])) for name in self.names]
        self.values = [torch.randn(size, device=device) for size in sizes] * len(FILES)
        blocks = [*[[Kind(size, torch.float32) for size in sizes]] * len(FILES), [Kind(size, torch.bfloat16) for size in sizes]]
        self.memory = HostMemory(blocks, locks=device == "cuda")
        tensors, count = self.memory.ready(), len(sizes)
        self.on_host, self.for_engine = tensors[:-count], dict(zip(self.names, tensors[-count:], strict=True))
        self.bodies = {which: self._body(tensors[i * count : (i + 1) * count]) for i, which in enumerate(FILES)}

    def _body(self, tensors: list[Tensor]) -> Body:
        each = {
            f"{name}.{number}": row
            for name, stacked in zip(self.names, tensors, strict=True)
            for number, row in enumerate(stacked)
        }
        return safetensors_writer.body_of(each, in_order=True)

    def once(self, way: str, folder: Path) -> tuple[float, dict[str, str]]:
        """Return the seconds and the digests of the files, which are deleted."""
        begin = time.perf_counter()
        for target, value in zip(self.on_host, self.values, strict=True):
            target.copy_(value, non_blocking=True)
        if way == DEVICE:
            for target, value in zip(self.for_engine.values(), self.values, strict=False):
                target.copy_(value, non_blocking=True)
        if self.device == "cuda":
            torch.cuda.synchronize()
        with ThreadPoolExecutor() as threads:
            writing = {
                which: threads.submit(safetensors_writer.write, folder / which, body, {}) for which, body in self.bodies.items()
            }
            if way == HOST:
                for target, value in zip(self.for_engine.values(), self.on_host, strict=False):
                    target.copy_(value)
            writing["engine"] = threads.submit(
                safetensors_writer.write, folder / "engine", safetensors_writer.body_of(self.for_engine), {}
            )
        seconds = time.perf_counter() - begin
        for path in folder.iterdir():
            path.unlink()
        return seconds, {which: written.result() for which, written in writing.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=3)
    o = parser.parse_args()
    o.folder.mkdir(parents=True, exist_ok=True)
    export = Export(o.layers, "cuda" if torch.cuda.is_available() else "cpu")
    seconds: dict[str, list[float]] = {HOST: [], DEVICE: []}
    digests: list[dict[str, str]] = []
    for _ in range(o.repeat):
        for way, measured in seconds.items():
            taken, made = export.once(way, o.folder)
            measured.append(round(taken, 3))
            digests.append(made)
    found: dict[str, Any] = {"command": sys.argv, "torch": torch.__version__, "seconds": seconds}
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    found["digests_are_equal"] = all(made == digests[0] for made in digests)
    write_json(o.out, found)
    for way, measured in seconds.items():
        print(f"{way}: {median(measured):.2f} s ({min(measured):.2f} to {max(measured):.2f})")
    export.memory.free()


if __name__ == "__main__":
    main()
