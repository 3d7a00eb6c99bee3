"""How long a small note takes that replaces itself while large files are on their way to the disk: by `rename`, and by an exchange of names.

    python tests/benches/notes.py FOLDER [--megabytes 1500] [--repeat 5] [--every-s 0.02]

Two files of --megabytes each are written as the trainer writes them. Meanwhile `write_note` writes the same note again, every --every-s seconds.
The ways in turns; FOLDER decides which disk and file system.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles

import torch

from infra.megatron.checkpoint import safetensors_writer
from infra.megatron.checkpoint.safetensors_writer import Body
from infra.store import exchange, files

BEGUN_S = 0.3
"""After which the disk is busy."""


def seconds_of_notes(folder: Path, bodies: list[Body], every_s: float) -> list[float]:
    paths = [folder / f"bench-{number}.safetensors" for number in range(len(bodies))]
    found: list[float] = []
    with ThreadPoolExecutor() as writers:
        writing = [writers.submit(safetensors_writer.write, *each, {}) for each in zip(paths, bodies, strict=True)]
        time.sleep(BEGUN_S)
        while not found or not all(each.done() for each in writing):
            begin = time.perf_counter()
            files.write_note(folder / "note.json", {"pid": len(found)})
            found.append(time.perf_counter() - begin)
            time.sleep(every_s)
    for path in paths:
        files.sync(path)
        path.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=1500)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--every-s", type=float, default=0.02)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    bodies = [safetensors_writer.body_of({"rows": torch.randn(options.megabytes * 10**6 // 4)}) for _ in range(2)]
    usual = exchange.replace
    ways = {"by rename": Path.replace, "by an exchange": usual}
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(options.repeat):
        for name, way in ways.items():
            exchange.replace = way  # type: ignore[assignment]
            found[name].append(seconds_of_notes(options.folder, bodies, options.every_s))
    for name, turns in found.items():
        every = [1e3 * seconds for turn in turns for seconds in turn]
        longest = [1e3 * max(turn) for turn in turns]
        most = quantiles(every, n=10)[-1] if len(every) > 1 else every[0]
        print(
            f"{name}: {len(every)} notes, half of them within {median(every):.2f} ms, 90% within {most:.2f} ms; "
            f"the longest of a turn {median(longest):.1f} ms ({min(longest):.1f} to {max(longest):.1f})"
        )


if __name__ == "__main__":
    main()
