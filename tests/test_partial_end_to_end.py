"""Partial rollouts with the real SGLang and the real trainer: what the engine says of an answer that went on, the trainer says too."""

from pathlib import Path

import pytest

from flows.presets import smoke
from flows.run import rl_run
from infra.config import CorrectionConfig, EvaluationConfig
from infra.engines.server import server_process
from infra.runs.manifest import read_manifest
from infra.settings import settings
from infra.store.files import path_of, read_json
from infra.store.layout import run_folder
from infra.store.samples import read_samples

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("prefect_server", "ends_real_programs")
def test_answers_of_the_real_engine_go_on_in_the_next_step_and_the_trainer_agrees_with_every_token(tiny: Path) -> None:
    """The learning rate is next to nothing: both adapters are the base model, and a token that lost its place would be seen. Half of the
    groups are aborted, some of their answers under way and some in SGLang's queue: by such SGLang itself never unloads the adapter."""
    base = smoke()
    loss = base.trainer.loss.but(correction=CorrectionConfig(mode="decoupled", kind="tis"))
    config = base.but(
        name="r",
        model=str(tiny),
        num_steps=2,
        data=base.data.but(num_prompts=8, num_oversampled_prompts=8, partial_rollouts=True),
        sampling=base.sampling.but(group_size=4),
        engine=base.engine.but(deterministic=False, max_running_requests=16),
        trainer=base.trainer.but(learning_rate=1e-12, loss=loss),
        evaluation=EvaluationConfig(every=0),
    )
    rl_run.with_options(result_storage=settings().results)(config)
    first, second = (read_manifest(run_folder("r") / f"steps/{step:06d}") for step in range(2))
    left = first.rollouts.left_over
    assert left is not None and len(left.prompt_ids) == 8
    prefixes = {
        (sample.prompt_id, sample.sample_index): sample
        for sample in read_samples(path_of(left.samples))
        if sample.finish_reason == "abort"
    }
    went_on = {(s.prompt_id, s.sample_index): s for s in read_samples(path_of(second.rollouts.file)) if s.num_older_tokens}
    assert prefixes and prefixes.keys() <= went_on.keys()
    for key, beginning in prefixes.items():
        whole = went_on[key]
        assert list(whole.output_tokens[: whole.num_older_tokens]) == list(beginning.output_tokens)
        assert 0 < whole.num_older_tokens < len(whole.output_tokens) <= config.sampling.max_output_tokens
    state = server_process.recorded()
    assert state is not None and state.launch == 1, "no engine had to be started again"
    metrics = read_json(run_folder("r") / "steps/000001/report.json")["metrics"]
    assert 0 < metrics["rollout/older_tokens_frac"] == metrics["rollout/age"] < 1
    assert metrics["mismatch/max_abs_logprob_diff"] < 1e-3, metrics
