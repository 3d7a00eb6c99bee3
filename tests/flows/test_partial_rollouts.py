"""A run with partial rollouts: what a step aborts, the next one goes on with. A real trainer, a scripted engine."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flows.replay import replay_step
from flows.run import rl_run
from flows.step import rl_step
from infra.config import CorrectionConfig, EvaluationConfig, RunConfig
from infra.runs.manifest import Manifest, read_manifest
from infra.settings import settings
from infra.store.files import path_of, read_json, read_json_lines, write_json
from infra.store.layout import run_folder
from infra.store.samples import read_samples

NUM_STEPS, NUM_PROMPTS, NUM_SPARE = 3, 4, 2

pytestmark = [pytest.mark.usefixtures("prefect_server", "ends_programs"), pytest.mark.timeout(900)]


@pytest.fixture
def config(scripted: RunConfig) -> RunConfig:
    trainer = scripted.trainer
    loss = trainer.loss.but(correction=CorrectionConfig(mode="decoupled", kind="tis"))
    return scripted.but(
        num_steps=NUM_STEPS,
        trainer=trainer.but(mode="persistent", loss=loss),
        data=scripted.data.but(num_prompts=NUM_PROMPTS, num_oversampled_prompts=NUM_SPARE, partial_rollouts=True),
        engine=scripted.engine.but(deterministic=False),
        evaluation=EvaluationConfig(every=0),
    )


def made(step: int, run: str = "r") -> Manifest:
    return read_manifest(run_folder(run) / f"steps/{step:06d}")


def prompt_ids(manifest: Manifest) -> list[int]:
    return [row["prompt_id"] for row in read_json_lines(path_of(manifest.prompts.file))]


def run(config: RunConfig) -> Any:
    return rl_run.with_options(result_storage=settings().results)(config)


def test_every_group_of_a_run_is_trained_on_once_and_no_token_is_older_than_one_step(config: RunConfig, workspace: Path) -> None:
    run(config)
    steps = [made(step) for step in range(NUM_STEPS)]
    assert [prompt_ids(step) for step in steps] == [[0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8, 9], [8, 9, 10, 11, 12, 13]]
    trained = [sorted({sample.prompt_id for sample in read_samples(path_of(step.rollouts.file))}) for step in steps]
    assert trained == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], "the scripted engine answers in order"
    for before, step in pairwise(steps):
        left = before.rollouts.left_over
        assert left is not None and step.prompts.begun == left.samples
        assert (step.prompts.num_begun_prompts, step.prompts.first_row) == (NUM_SPARE, prompt_ids(step)[NUM_SPARE])
        begun = {(each.prompt_id, each.sample_index): each for each in read_samples(path_of(left.samples))}
        assert {prompt_id for prompt_id, _ in begun} == {*left.prompt_ids}
        samples = read_samples(path_of(step.rollouts.file))
        older = {(each.prompt_id, each.sample_index): each for each in samples if each.num_older_tokens}
        assert older.keys() == begun.keys()
        for key, sample in older.items():
            assert sample.older_adapter_sha256 == before.adapter_in.sha256 != sample.adapter_sha256
            assert list(sample.output_tokens[: sample.num_older_tokens]) == list(begun[key].output_tokens)
            assert sample.finish_reason == "stop" and sample.reward is None
        num_older = sum(sample.num_older_tokens for sample in samples)
        assert step.rollouts.num_older_tokens == num_older > 0
        metrics = read_json(run_folder("r") / f"steps/{step.step:06d}/report.json")["metrics"]
        assert metrics["rollout/age"] == metrics["rollout/older_tokens_frac"] == num_older / step.rollouts.num_output_tokens
        assert "mismatch/weight_mean" in metrics, "what is older is corrected for"
        about = read_samples(path_of(step.batch.samples)) if step.batch.samples else []
        assert sum(sample.num_older_tokens for sample in about) == num_older, "the batch's table says it too"
    assert steps[0].rollouts.num_older_tokens == 0 and not steps[0].prompts.num_begun_prompts


@pytest.mark.full  # the other tests of this file are its sample
def test_steps_that_are_made_one_by_one_are_those_of_the_run_that_begins_its_rollouts_early(config: RunConfig) -> None:
    run(config)
    alone = config.but(name="alone")
    for _ in range(NUM_STEPS):
        rl_step.with_options(result_storage=settings().results)(alone)
    for step in range(NUM_STEPS):
        ours, theirs = made(step), made(step, "alone")
        assert ours.rollouts.file.sha256 == theirs.rollouts.file.sha256
        assert (ours.prompts.file.sha256, ours.adapter_out.sha256) == (theirs.prompts.file.sha256, theirs.adapter_out.sha256)


def test_a_replay_takes_over_what_was_left_and_a_run_goes_on_with_it(config: RunConfig) -> None:
    for _ in range(2):
        rl_step.with_options(result_storage=settings().results)(config)
    for task in ("draw_prompts", "roll_out"):
        with pytest.raises(ValueError, match=r"goes on with 2 groups that the step before has begun .* replay it from score"):
            replay_step("r", 1, "again", task)
    replay_step.with_options(result_storage=settings().results)("r", 1, "again", "score")
    left, old = made(1, "again").rollouts.left_over, made(1).rollouts.left_over
    assert left is not None and old is not None and left.samples.sha256 == old.samples.sha256
    assert path_of(left.samples).is_relative_to(run_folder("again")) and path_of(left.prompts).is_relative_to(run_folder("again"))
    rl_step.with_options(result_storage=settings().results)(config)
    going_on = config.but(name="again")
    rl_step.with_options(result_storage=settings().results)(going_on)
    assert made(2, "again").rollouts.file.sha256 == made(2).rollouts.file.sha256
    replay_step.with_options(result_storage=settings().results)("r", 0, "first", "draw_prompts")
    assert made(0, "first").rollouts.left_over is not None


def test_a_step_whose_predecessor_has_left_nothing_says_so(config: RunConfig) -> None:
    dropping = config.but(data=config.data.but(partial_rollouts=False))
    rl_step.with_options(result_storage=settings().results)(dropping)
    path = run_folder("r") / "steps/000000/manifest.json"
    write_json(path, read_json(path) | {"config": config.model_dump(mode="json")})  # no command can change it
    with pytest.raises(ValueError, match=r"steps/000000/manifest\.json says of no group that it goes on in step 1"):
        rl_step.with_options(result_storage=settings().results)(config)
