import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect import Task, task
from prefect.context import TaskRunContext

from infra.config import BatchConfig, RewardConfig
from infra.records import AdapterVersion, BaseModelRef, File, ScoredRollouts, Step
from infra.store import code_digest
from tasks.assemble import assemble
from tasks.score import score
from tasks.support.caching import CACHED, cached

FILE = File(path="runs/mine/x", sha256="abc", num_bytes=3)
SCORED = ScoredRollouts(
    run="mine",
    step=2,
    adapter_version=1,
    adapter_sha256="abc",
    file=FILE,
    num_prompts=2,
    group_size=2,
    temperature=0.7,
    num_samples=4,
    mean_reward=0.5,
    std_reward=0.5,
    num_trainable_groups=1,
)
ADAPTER = AdapterVersion(
    run="mine", version=2, base=BaseModelRef(id="tiny", sha256="b"), rank=8, alpha=16, target_modules=("q_proj",), seed=0
)


def key_of(of: Task[..., Any], **inputs: Any) -> str:
    """The key under which Prefect keeps the task's result."""
    context = TaskRunContext.model_construct(task=of)
    key = of.cache_policy.compute_key(task_ctx=context, inputs=inputs, flow_parameters={})  # type: ignore[union-attr]
    assert key is not None
    return key


def test_equal_inputs_give_the_same_key_which_names_run_step_and_task() -> None:
    key = key_of(assemble, config=BatchConfig(), scored=SCORED)
    assert key == key_of(assemble, scored=SCORED.model_copy(deep=True), config=BatchConfig.model_validate({}))
    assert key.startswith("mine/000002/assemble-")


@pytest.mark.parametrize(
    "inputs",
    [
        {"config": BatchConfig(advantage="dr_grpo"), "scored": SCORED},
        {"config": BatchConfig(), "scored": SCORED.model_copy(update={"step": 3})},
        {"config": BatchConfig(), "scored": SCORED.model_copy(update={"file": FILE.model_copy(update={"sha256": "abd"})})},
    ],
    ids=["config", "step", "digest"],
)
def test_another_input_gives_another_key(inputs: dict[str, Any]) -> None:
    assert key_of(assemble, **inputs) != key_of(assemble, config=BatchConfig(), scored=SCORED)


def test_tasks_of_one_module_with_equal_inputs_have_other_keys() -> None:
    verify = task(name="verify", cache_policy=CACHED)(assemble.fn)
    keys = [key_of(each, config=BatchConfig(), scored=SCORED) for each in (assemble, verify)]
    assert keys[0].rpartition("-")[2] != keys[1].rpartition("-")[2]


@pytest.mark.parametrize("place", [Step(run="mine", index=2, seed=0), SCORED, ADAPTER], ids=["step", "record", "adapter"])
def test_run_and_step_are_found_in_whichever_input_knows_them(place: object) -> None:
    assert key_of(assemble, config=BatchConfig(), place=place).startswith("mine/000002/")


def test_a_cached_task_without_run_and_step_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match=r"needs an input that knows its run and step, got \['config'\]"):
        CACHED.cache_key_fn(TaskRunContext.model_construct(task=assemble), {"config": BatchConfig()})  # type: ignore[attr-defined]


def test_other_code_has_other_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks").mkdir()
    monkeypatch.setattr(code_digest, "CHECKOUT", tmp_path)
    task_file = tmp_path / "tasks/of_this_test.py"

    def key_with(text: str) -> str:
        """As a new process would make it."""
        task_file.write_text(text)
        for function in (code_digest.digest, code_digest.digest_of_file, code_digest._imports):
            function.cache_clear()
        spec = importlib.util.spec_from_file_location("tasks.of_this_test", task_file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "tasks.of_this_test", module)
        spec.loader.exec_module(module)
        return key_of(task(cache_policy=cached())(module.work), scored=SCORED)

    key = key_with("def work(scored): return 1")
    assert key_with("# a word\ndef work(scored):\n    return 1") == key
    assert key_with("def work(scored): return 2") != key
    assert key_with("def work(scored): return 1") == key


def test_what_else_decides_a_result_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    def key_with(text: str) -> str:
        (tmp_path / "reward_of_this_test.py").write_text(text)
        monkeypatch.delitem(sys.modules, "reward_of_this_test", raising=False)
        return key_of(score, config=RewardConfig(name="reward_of_this_test.mine"), rollouts=SCORED)

    keys = [key_with(f"def mine(*, question, completion, answer): return {reward}") for reward in ("1.0", "0.25", "1.0")]
    assert keys[0] == keys[2] != keys[1]
