"""Does it learn on a GPU? Makes the model `small`, then three seeds of the preset `arithmetic-gpu` and the control; page and picture.

    python tests/gpu/learning.py OUT_FOLDER [--preset arithmetic-gpu] [--seeds 0 1 2] [--set FIELD=VALUE ...]

Runs that are there are gone on with, so it can be called again. Fails where a seed does not gain what is wanted, or where the control
gains as much as a seed. `--make 2` makes the third run only and draws nothing: runs can be made side by side then, each in a workspace
of its own, and drawn by `--only-draw` in one that holds them all. `--figures` makes nothing and prints what the workspace's runs gave so far;
so does `--make` when it ends. Two of them with other `--set` compare configurations, such as engine.quantization=fp8 with none.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benches"))

from learning_curves import configs, curves_of, machine, make_missing, publish
from learning_picture import Curves

from flows.presets import preset
from infra.config import RunConfig
from infra.config.tools.overrides import with_overrides
from infra.models import base_model
from infra.store.files import open_workspace, read_json, write_json
from infra.store.layout import RunFolder, StepFolder, run_folder

FIGURES = ("mismatch/mean_abs_logprob_diff", "mismatch/kl_k3")
WANTED_GAIN = 0.15
"""In sampled pass@1: five times its standard error with 1,024 answers."""


def main() -> None:
    options = _options()
    open_workspace()
    begun = time.monotonic()
    base = with_overrides(preset(options.preset), options.set)
    base_model.locate(base.model)  # made here if it is not there
    made_s = time.monotonic() - begun
    chosen = configs(base, options.seeds)
    if not (options.only_draw or options.figures):
        make_missing([chosen[number] for number in options.make] or chosen)
    if options.make or options.figures:
        print("\n".join(line for config in chosen if run_folder(config.name).exists() for line in figures_of(config)))
        return
    command = " ".join(["python tests/gpu/learning.py", *sys.argv[1:]])
    page, picture = options.folder / "learning-gpu.md", options.folder / "learning-gpu.png"
    publish(chosen, page, picture, link=picture.name, command=command, machine=machine())
    gains = {curves.name: gain_of(curves) for curves in map(curves_of, chosen)}
    write_json(options.folder / "learning-gpu.json", {"model_s": made_s, "wall_s": time.monotonic() - begun, "gains": gains})
    wrong = failures(list(gains.values()))
    print("\n".join([*(f"{name}: {gain:+.3f}" for name, gain in gains.items()), *wrong, f"{len(wrong)} failed"]))
    sys.exit(bool(wrong))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", default="arithmetic-gpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--make", type=int, nargs="+", default=[], metavar="N", help="only these of the runs; the last is the control"
    )
    parser.add_argument("--only-draw", action="store_true", help="make no run")
    parser.add_argument("--figures", action="store_true", help="make no run and draw nothing: print what there is")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    return parser.parse_args()


def figures_of(config: RunConfig) -> list[str]:
    """Lines for people: pass@1 at each evaluation, each step's mean reward and mismatch, and the trainer's seconds in the first step."""
    name, curves = config.name, curves_of(config)
    folders = [StepFolder(path) for path in sorted(RunFolder.of(name).steps.glob("[0-9]*"))]
    metrics = [read_json(folder.report)["metrics"] for folder in folders if folder.report.exists()]
    words = {
        step: f"greedy {at.greedy:.3f}, sampled {at.sampled:.3f}, worked out {at.worked:.3f}"
        for step, at in curves.points.items()
    }
    return [
        *(f"{name} after {step} steps: {word}" for step, word in words.items()),
        f"{name} mean reward by step: {' '.join(f'{reward:.3f}' for reward in curves.rewards)}",
        *(f"{name} {figure} by step: {' '.join(f'{each[figure]:.4f}' for each in metrics)}" for figure in FIGURES),
        *(f"{name} trainer in its first step: {read_json(folder.train.result)['seconds']}" for folder in folders[:1] if metrics),
        f"{name} seconds: {curves.seconds}",
    ]


def gain_of(curves: Curves) -> float:
    """In sampled pass@1, from before the first step to after the last."""
    return curves.points[max(curves.points)].sampled - curves.points[min(curves.points)].sampled


def failures(gains: list[float]) -> list[str]:
    """gains: of each seed, then of the control."""
    *learning, control = gains
    wrong = [f"a seed gained {gain:.3f}, wanted is {WANTED_GAIN}" for gain in learning if gain < WANTED_GAIN]
    if control >= min(learning):
        wrong.append(f"the control gained {control:.3f}, a seed {min(learning):.3f}")
    return wrong


if __name__ == "__main__":
    main()
