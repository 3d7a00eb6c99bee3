"""The figures of learning curves, from files as runs leave them; no run is made."""

from pathlib import Path
from types import ModuleType

import pytest
from learning_curves import configs, curves_of, page_of, publish, row_of
from learning_picture import Curves, Point, mean_of
from shared import load_module

from flows.presets import preset
from infra.config import RunConfig
from infra.eval_records import Evaluation
from infra.runs import evaluations
from infra.settings import CHECKOUT
from infra.store.files import record_of, write_json
from infra.store.layout import run_folder
from infra.store.samples import Sample, write_samples

RIGHT_WORKED, WRONG_WORKED, GUESS = ("2 + 2 = 4\n#### 4", 1.0), ("2 + 2 = 5\n#### 5", 0.0), ("#### 3", 0.0)


def sample(text: str, reward: float, number: int) -> Sample:
    return Sample(0, number, [1], [2], [-0.1], "stop", 0, "a", text=text, reward=reward)


def leave_behind(config: RunConfig, rewards: list[float], answers: dict[int, list[tuple[str, float]]]) -> None:
    """A run's files: mean reward of each step, and sampled answers by adapter version."""
    for step, reward in enumerate(rewards):
        write_json(run_folder(config.name) / f"steps/{step:06d}/report.json", {"metrics": {"reward/mean": reward}})
    for version, given in answers.items():
        folder = run_folder(config.name) / f"evaluations/{version:06d}-a-e"
        write_samples(folder / "sampled.parquet", [sample(*answer, number) for number, answer in enumerate(given)])
        right = sum(reward for _, reward in given) / len(given)
        made = Evaluation(
            run=config.name,
            step=version,
            adapter_sha256="a",
            eval_digest=evaluations.eval_digest(config.eval_config),
            file=record_of(write_samples(folder / "greedy.parquet", [])),
            num_prompts=1,
            num_overlapping=0,
            pass_at_1=0.25 * version,
            pass_at_k={"1": right},
            truncated_frac=0.0,
        )
        evaluations.write(folder, made)


def test_seeds_differ_in_the_seed_alone_and_the_control_in_its_rewards_alone() -> None:
    base = preset("arithmetic")
    *learning, control = configs(base, (3, 4))
    assert [config.name for config in (*learning, control)] == [
        "learning-arithmetic-3",
        "learning-arithmetic-4",
        "learning-arithmetic-control",
    ]
    assert [config.but(name="arithmetic", seed=0) for config in learning] == [base, base]
    assert learning[0].seed == control.seed == 3
    assert control.reward.shuffle_seed is not None
    assert control.but(name=learning[0].name, reward=learning[0].reward) == learning[0]


def test_curves_say_how_many_answers_are_worked_out_and_how_many_of_these_are_right(workspace: Path) -> None:
    (config, _) = configs(preset("arithmetic"), (0,))
    leave_behind(config, [0.25, 0.5], {0: [GUESS, GUESS], 2: [RIGHT_WORKED, WRONG_WORKED, RIGHT_WORKED, GUESS]})
    found = curves_of(config)
    assert found.rewards == [0.25, 0.5]
    assert found.points == {0: Point(0.0, 0.0, 0.0, None), 2: Point(0.5, 0.5, 0.75, pytest.approx(2 / 3))}  # type: ignore[arg-type]
    assert not found.is_control and found.seconds is None


def test_a_row_shows_each_figure_before_and_after() -> None:
    points = {0: Point(0.1, 0.2, 0.3, None), 5: Point(0.5, 0.5, 0.5, 0.5), 10: Point(0.9, 0.8, 0.7, 0.6)}
    curves = Curves("run", False, [0.0, 0.1, 0.2, 0.5, 0.7, 0.8, 0.9], points, 90.0)
    assert row_of(curves) == "| run | 0.10 -> 0.90 | 0.20 -> 0.80 | 0.30 -> 0.70 | - -> 0.60 | 0.10 -> 0.80 | 1.5 |"


def test_the_mean_of_seeds_is_taken_where_all_of_them_have_a_value() -> None:
    assert mean_of([{0: 0.0, 5: 1.0, 10: 1.0}, {0: 0.5, 5: 0.5}]) == {0: 0.25, 5: 0.75}


def test_page_and_picture_are_made_from_the_runs_that_are_there(workspace: Path, tmp_path: Path) -> None:
    chosen = configs(preset("arithmetic"), (0, 1))
    for config in chosen:
        leave_behind(config, [0.25, 0.5], {0: [GUESS, RIGHT_WORKED], 2: [RIGHT_WORKED, WRONG_WORKED]})
    page, picture = tmp_path / "learning.md", tmp_path / "learning.png"
    publish(chosen, page, picture, link="here.png", command="a command", machine="a machine")
    text = page.read_text()
    assert "![Learning curves](here.png)" in text and "`a command`" in text and "a machine." in text
    assert [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| learning")] == [
        f"| {config.name}" for config in chosen
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_page_names_what_was_run() -> None:
    (config, _) = configs(preset("arithmetic"), (0,))
    curves = Curves("run", False, [0.5], {0: Point(0.1, 0.2, 0.3, 0.4)}, None)
    text = page_of([curves, curves], config, command="c", machine="m", link="l")
    assert f"{config.num_steps} steps of {config.data.num_prompts} prompts x {config.sampling.group_size} samples" in text
    assert f"learning rate {config.trainer.learning_rate:g};" in text


@pytest.fixture(scope="module")
def gpu_script() -> ModuleType:
    return load_module(CHECKOUT / "tests/gpu/learning.py")


@pytest.mark.parametrize(
    ("gains", "num_failed"),
    [
        ([0.4, 0.5, 0.3, 0.05], 0),
        ([0.4, 0.1, 0.3, 0.05], 1),
        ([0.4, 0.5, 0.3, 0.3], 1),
        ([0.1, 0.1, 0.1, 0.2], 4),
        ([0.2, -0.1], 0),
    ],
)
def test_the_script_for_gpus_fails_where_a_seed_does_not_gain_or_the_control_does(
    gpu_script: ModuleType, gains: list[float], num_failed: int
) -> None:
    assert len(gpu_script.failures(gains)) == num_failed
