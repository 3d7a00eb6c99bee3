import inspect
from pathlib import Path

import pytest

from flows.presets import PRESETS, preset
from infra.config.tools.changes import changes, may_change
from infra.forecast.shapes import model_of
from infra.rewards.loading import import_member
from infra.settings import settings
from infra.simulation.run_plan import Host, plan_run


def test_every_preset_is_a_run_that_can_be_lengthened() -> None:
    for name in PRESETS:
        config = preset(name)
        assert config.but(num_steps=config.num_steps + 1).name == config.name
        assert config.evaluation.every <= config.num_steps


def test_the_gsm8k_presets_carry_the_values_of_the_published_runs() -> None:
    """eric-haibin-lin/verl-data, gsm8k/Qwen2.5-0.5B-bsz64_2-prompt512-resp1024-lorarank32-score0.543.log at bf76ddd."""
    for name in ("gsm8k-qwen2.5-0.5b", "gsm8k-qwen2.5-1.5b", "gsm8k-qwen2.5-7b"):
        config = preset(name)
        trainer, loss = config.trainer, config.trainer.loss
        assert (config.data.num_prompts, config.sampling.group_size, trainer.num_minibatches) == (64, 5, 1)
        assert (config.data.max_prompt_tokens, config.sampling.max_output_tokens, config.sampling.temperature) == (512, 1024, 1.0)
        assert (trainer.learning_rate, trainer.weight_decay, trainer.max_grad_norm) == (3e-5, 0.01, 1.0)
        assert (trainer.adam_beta1, trainer.adam_beta2, trainer.lr_scheduler_type) == (0.9, 0.999, "constant")
        assert (trainer.lora.rank, trainer.lora.alpha, len(trainer.lora.target_modules)) == (32, 32, 7)
        assert (loss.clip_low, loss.clip_high, loss.dual_clip, loss.aggregation) == (0.2, 0.2, 3.0, "token_mean")
        assert (loss.kl.coefficient, loss.kl.estimator, loss.kl.where, loss.entropy_bonus) == (0.001, "k3", "loss", 0.001)
        assert (config.batch.advantage, config.reward.name) == ("grpo", "gsm8k_verl_strict")
        assert config.num_steps == 7473 // 64
        assert (config.eval_config.data.split, config.eval_config.data.num_prompts) == ("test", 1319)
    assert [preset(name).model.rsplit("-", 2)[1] for name in PRESETS if name.startswith("gsm8k-")] == ["0.5B", "1.5B", "7B"]


def test_on_four_gpus_the_same_run_is_made_in_another_layout_only() -> None:
    one = preset("gsm8k-qwen2.5-7b")
    four, _ = plan_run(one, Host(4, "H100", 512 * 2**30), model_of("qwen2.5-7b"))
    differing = {change.field for change in changes(one, four)}
    assert differing == {"engine.replicas", "trainer.num_processes"} and all(may_change(field) for field in differing)
    assert (four.engine.replicas, four.trainer.num_processes) == (4, 4)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError,
        match="preset 'gsm9k' is unknown; the nearest is gsm8k; known are arithmetic, arithmetic-gpu, smoke, calculator, calculator-taskset, tools",
    ):
        preset("gsm9k")


def test_the_examples_of_several_turns_name_environments_that_exist() -> None:
    for name in ("calculator", "tools", "digits"):
        assert inspect.isclass(import_member(preset(name).environment.name))
    python, agent = preset("program").environment.command
    assert Path(agent).is_file() and python == str(settings().sglang_python)
