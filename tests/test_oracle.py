"""A run of episodes by the real SGLang and the real trainer, recomputed from its files by tests/benches/oracle.py, which uses none of our code."""

from pathlib import Path

import pytest

from flows.presets import calculator
from flows.run import rl_run
from infra.config import EvaluationConfig
from infra.settings import settings
from infra.store.layout import run_folder

pytestmark = [pytest.mark.end_to_end, pytest.mark.full, pytest.mark.timeout(900)]
NUM_STEPS = 3


@pytest.mark.usefixtures("prefect_server", "ends_real_programs")
def test_transformers_and_peft_come_to_the_same_log_probabilities_and_updates(tiny: Path) -> None:
    import oracle  # imports torch

    base = calculator()
    config = base.but(
        name="r",
        model=str(tiny),
        num_steps=NUM_STEPS,
        data=base.data.but(num_prompts=6),
        evaluation=EvaluationConfig(every=0),
    )
    rl_run.with_options(result_storage=settings().results)(config)
    found = list(oracle.steps(run_folder("r"), tiny, NUM_STEPS))
    assert len(found) == NUM_STEPS
    for figures in found:
        print(figures)
        assert figures["max_logprob_diff"] < 1e-3
        assert figures["update_error"] < 1e-3
        assert figures["update_error_of_others"] < 1e-5
    assert all(figures["grad_norm"] > 0 and figures["num_tokens"] > 100 for figures in found)
