"""An evaluation whose answers a second model judges, in turns with the engine."""

from itertools import groupby
from pathlib import Path

import pytest

from infra.config import EngineConfig, EvaluationConfig, RewardConfig, RunConfig
from infra.engines.scripted import ScriptedEngine
from infra.runs.lineage import adapter_at
from tasks.evaluations.evaluate_adapter import evaluate_adapter


def test_the_engine_makes_room_before_its_answers_are_judged_and_the_judge_before_the_next_are_sampled(
    workspace: Path, random_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    for name in ("wake", "release_memory"):
        method = getattr(ScriptedEngine, name)

        def noted(self: ScriptedEngine, name: str = name, method: object = method) -> object:
            seen.append(f"{name} {'judge' if self.replica else 'engine'}")
            return method(self)  # type: ignore[operator]

        monkeypatch.setattr(ScriptedEngine, name, noted)
    how = {"by": "model", "model": str(random_tiny), "rubric": "{completion}", "score_pattern": r"#### (\d+)", "max_score": 999}
    judge = how | {"max_output_tokens": 16, "server": {"max_context_tokens": 256}}
    config = RunConfig(
        name="mine",
        model=str(random_tiny),
        engine=EngineConfig(kind="scripted"),
        reward=RewardConfig.model_validate({"name": "rubric", "judge": judge, "max_unjudged_frac": 1.0}),
        evaluation=EvaluationConfig(num_prompts=4, num_samples=2, pass_at_k=(1, 2)),
    )
    made = evaluate_adapter.fn(config.engine, config.eval_config, config.data, adapter_at(config, 0))
    ScriptedEngine.stop_in(workspace)
    assert made.mean_reward
    turn = ["wake engine", "release_memory engine", "wake judge", "release_memory judge"]
    assert [name for name, _ in groupby(seen)] == 2 * turn, "greedy answers, then sampled ones"
