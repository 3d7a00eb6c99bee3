"""The forecast against every measured point: each by a fit to all points, by one without this point, and by one without its model.

    python tests/benches/forecast_points.py [--gpu FORECAST.json] [--save OUT.json]

The tables are those of docs/results/speed.md. --gpu adds the points that tests/gpu/forecast.py measured, before the fit.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from infra.forecast.fit import GIB, Coefficients, decoding_s, fit, peak_bytes, trainer_of, training_s, work_of
from infra.forecast.points import Points, RolloutPoint, TrainingPoint, measured_points
from infra.forecast.shapes import GPU_KINDS, model_of, with_layers

Point = TrainingPoint | RolloutPoint


class Compared(NamedTuple):
    what: str
    label: str
    measured: float
    fitted: float
    without_point: float
    without_model: float | None
    """None: no other model has such points."""

    @property
    def differences(self) -> tuple[float | None, ...]:
        found = (self.fitted, self.without_point, self.without_model)
        return tuple(None if each is None else each / self.measured - 1 for each in found)


def peak_gib(point: TrainingPoint, coefficients: Coefficients) -> float:
    model = with_layers(model_of(point.model), point.num_layers)
    return peak_bytes(trainer_of(point), model, work_of(point), coefficients) / GIB


def train_s(point: TrainingPoint, coefficients: Coefficients) -> float:
    model = with_layers(model_of(point.model), point.num_layers)
    return training_s(trainer_of(point), model, GPU_KINDS[point.gpu], work_of(point)._replace(passes=1), coefficients)


def rollout_s(point: RolloutPoint, coefficients: Coefficients) -> float:
    gpu = GPU_KINDS[point.gpu]
    return point.output_tokens * decoding_s(model_of(point.model), point.rank, gpu, point.running, coefficients)


def fit_without(points: Points, left_out: Callable[[Point], bool]) -> Coefficients | None:
    training = tuple(point for point in points.training if not left_out(point))
    rollout = tuple(point for point in points.rollout if not left_out(point))
    has_all = any(p.peak_gib for p in training) and any(p.seconds for p in training) and rollout
    return fit(Points(training=training, rollout=rollout)) if has_all else None


def compare(points: Points) -> list[Compared]:
    everything, found = fit(points), []

    def add(what: str, point: Any, measured: float, value: Callable[[Any, Coefficients], float], label: str) -> None:
        one = fit_without(points, lambda each: each is point)
        model = fit_without(points, lambda each: each.model == point.model)
        others = None if model is None else value(point, model)
        found.append(Compared(what, label, measured, value(point, everything), value(point, one or everything), others))

    for p in points.training:
        layers = f", {p.num_layers} layers" if p.num_layers else ""
        label = f"{p.model}{layers}, {p.gpu}, micro-batch of {p.microbatch_rows:,}, rank {p.rank}{', recomputed' if p.recompute else ''}"
        if p.peak_gib:
            add("trainer's peak, GiB", p, p.peak_gib, peak_gib, label)
        if p.seconds:
            add("training, s", p, p.seconds, train_s, label)
    for r in points.rollout:
        add("rollout, s", r, r.seconds, rollout_s, f"{r.model}, {r.gpu}, {r.running} samples of {r.output_tokens} tokens")
    return found


def points_in(path: Path) -> list[TrainingPoint]:
    """What tests/gpu/forecast.py measured: each micro-batch holds whole groups, a prompt's last token counts for each sample."""
    content = json.loads(path.read_text())
    gpu = next(kind for kind in GPU_KINDS if kind in content["gpu"])
    found = []
    for name, case in content["cases"].items():
        if "left_out" in case:
            continue
        shape = case["shape"]
        group = shape["prompt_tokens"] - 1 + shape["group_size"] * shape["answer_tokens"] + shape["group_size"]
        group = case["rows"] // shape["num_prompts"] or group
        groups = min(shape["num_prompts"], max(1, shape["microbatch"] // group))
        found.append(
            TrainingPoint(
                model=case["model"],
                gpu=gpu,
                rank=case["rank"],
                rows=case["rows"],
                microbatch_rows=groups * group,
                microbatch_logits=groups * shape["group_size"] * shape["answer_tokens"],
                num_logits=case["num_loss_tokens"],
                sequence=shape["prompt_tokens"] + shape["answer_tokens"],
                num_layers=case["layers"],
                recompute=case["recompute"],
                peak_gib=round(case["peak_reserved_gib"], 2),
                seconds=round(case["seconds"], 3),
                source=f"tests/gpu/forecast.py OUT.json, case {name}",
            )
        )
    return found


def table(found: list[Compared]) -> list[str]:
    lines = []
    for what in dict.fromkeys(each.what for each in found):
        lines += [
            f"| {what} | measured | fitted | all points | without this one | without its model |",
            "|--|--:|--:|--:|--:|--:|",
        ]
        for each in (each for each in found if each.what == what):
            differences = " | ".join("-" if value is None else f"{value:+.1%}" for value in each.differences)
            lines.append(f"| {each.label} | {each.measured:.4g} | {each.fitted:.4g} | {differences} |")
        worst = [
            max(abs(value) for value in column if value is not None)
            for column in zip(*(c.differences for c in found if c.what == what), strict=True)
        ]
        lines += [f"largest difference: {', '.join(f'{value:.1%}' for value in worst)}", ""]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", type=Path, help="result of tests/gpu/forecast.py")
    parser.add_argument("--save", type=Path)
    o = parser.parse_args()
    points = measured_points()
    if o.gpu:
        points = points.model_copy(update={"training": (*points.training, *points_in(o.gpu))})
        print("\n".join(f"  {json.dumps(p.model_dump(exclude_defaults=True))}," for p in points_in(o.gpu)))
    found = compare(points)
    print("\n".join(table(found)))
    print(f"coefficients: {fit(points)._asdict()}")
    if o.save:
        o.save.write_text(json.dumps([each._asdict() for each in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
