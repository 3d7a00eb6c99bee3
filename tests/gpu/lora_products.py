"""Products of a layer with its adapter on one GPU: the adapter's matrices beside the frozen ones, or joined to them. Milliseconds each.

    python tests/gpu/lora_products.py [--rows 32768] [--small]

For the layers of the 0.5B shape (rank 16 and 32) and of the 7B shape (rank 16, 13,824 rows), in bfloat16:

    frozen   without the adapter
    beside   the frozen product, the adapter's narrow one, and its wide one added in place
    inner    joined along the inner dimension: [x | narrow] [W | B]', one pass over the output; backward G [W | B], one pass over G
    outer    joined along the outer dimension: x [W ; A]', one pass over x; backward [G | narrow] [W ; A], one pass over the result

--small: a CPU and few rows, to see that it works.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS = {
    "0.5b": {"qkv": (896, 1152, 3), "o": (896, 896, 1), "fc1": (896, 9728, 2), "fc2": (4864, 896, 1)},
    "7b": {"qkv": (3584, 4608, 3), "o": (3584, 3584, 1), "fc1": (3584, 37888, 2), "fc2": (18944, 3584, 1)},
}
"""Model -> layer -> input, output, adapters."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--small", action="store_true")
    o = parser.parse_args()
    print("CPU" if o.small else torch.cuda.get_device_name(), "torch", torch.__version__)
    for model, rank, rows in (("0.5b", 16, o.rows), ("0.5b", 32, o.rows), ("7b", 16, 13824)):
        for layer, (into, out, adapters) in LAYERS[model].items():
            scale = 16 if o.small else 1
            found = measured(8 if o.small else rows, into // scale, out // scale, adapters * rank, "cpu" if o.small else "cuda")
            print(model, layer, f"rank {rank}", {name: round(ms, 3) for name, ms in found.items()}, flush=True)


def measured(rows: int, into: int, out: int, ranks: int, device: str) -> dict[str, float]:
    options = {"device": device, "dtype": torch.bfloat16}
    x, gradient = torch.randn(rows, into, **options), torch.randn(rows, out, **options)  # type: ignore[arg-type]
    weight, down, up = (0.02 * torch.randn(*size, **options) for size in ((out, into), (ranks, into), (out, ranks)))  # type: ignore[arg-type]

    def outer() -> Tensor:
        both = F.linear(x, torch.cat([weight, down]))
        return torch.addmm(both[:, :out], both[:, out:], up.t())

    def inner_backward() -> Tensor:
        both = gradient @ torch.cat([weight, up], 1)
        return torch.addmm(both[:, :into], both[:, into:], down)

    ways: dict[str, Callable[[], Tensor]] = {
        "frozen": lambda: F.linear(x, weight),
        "beside": lambda: F.linear(x, weight).addmm_(F.linear(x, down), up.t()),
        "inner": lambda: F.linear(torch.cat([x, F.linear(x, down)], 1), torch.cat([weight, up], 1)),
        "outer": outer,
        "frozen, backward": lambda: gradient @ weight,
        "beside, backward": lambda: (gradient @ weight).addmm_(gradient @ up, down),
        "inner, backward": inner_backward,
        "outer, backward": lambda: torch.cat([gradient, gradient @ up], 1) @ torch.cat([weight, down]),
    }
    return {name: milliseconds(way, device) for name, way in ways.items()}


def milliseconds(way: Callable[[], Tensor], device: str, repeat: int = 10) -> float:
    """Mean of several calls, after some that are not counted."""
    for _ in range(3):
        way()
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    for _ in range(repeat):
        way()
    wait()
    return (time.perf_counter() - begin) / repeat * 1e3


if __name__ == "__main__":
    main()
