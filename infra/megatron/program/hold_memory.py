"""Hold memory for a while, in place of the trainer, where engines alone are compared.

python -m infra.megatron.program.hold_memory GIB SECONDS DEVICE

Memory that it cannot get is an error, as it would be for the trainer. The memory is written to: a host would not allocate it otherwise.
"""

import argparse
import time

import torch

GIB = 2**30
CHUNK_GIB = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m infra.megatron.program.hold_memory")
    parser.add_argument("gib", type=float)
    parser.add_argument("seconds", type=float)
    parser.add_argument("device", choices=["cpu", "cuda"])
    asked = parser.parse_args()
    devices = [f"cuda:{n}" for n in range(torch.cuda.device_count())] if asked.device == "cuda" else ["cpu"]
    left, held = asked.gib / len(devices), []
    while left > 0:
        size = min(left, CHUNK_GIB)
        held += [torch.ones(int(size * GIB), dtype=torch.uint8, device=device) for device in devices]
        left -= size
    print(f"holding {asked.gib:.2f} GiB on {', '.join(devices)} for {asked.seconds:g} s", flush=True)
    time.sleep(asked.seconds)


if __name__ == "__main__":
    main()
