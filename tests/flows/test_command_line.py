import pytest

from flows.command_line import parser, resolved
from flows.presets import arithmetic
from infra.config import RunConfig
from infra.overrides import flattened


def test_dotted_options_change_the_preset() -> None:
    config, found, show = resolved(
        ["--num-steps", "3", "--trainer.learning_rate", "1e-5", "--set", "data.num-prompts=4".replace("-", "_")]
    )
    base = arithmetic()
    assert config == base.but(num_steps=3, trainer=base.trainer.but(learning_rate=1e-5), data=base.data.but(num_prompts=4))
    assert not show
    sources = {origin.field: origin.source for origin in found}
    assert {field for field, source in sources.items() if source == "command line"} == {
        "num_steps",
        "trainer.learning_rate",
        "data.num_prompts",
    }
    assert sources["name"] == "preset" and sources["seed"] == "default"


def test_a_dash_will_do_for_an_underscore_and_the_last_word_counts() -> None:
    config, _, show = resolved(
        ["--show", "--trainer.max-grad-norm", "0.5", "--sampling.group_size", "2", "--sampling.group-size", "4"]
    )
    assert (config.trainer.max_grad_norm, config.sampling.group_size, show) == (0.5, 4, True)


def test_the_help_lists_every_field_with_its_section() -> None:
    text = " ".join(parser().format_help().split())
    for field in flattened(RunConfig().model_dump()):
        assert f"--{field} VALUE" in text
    assert "The Megatron LoRA trainer: one optimizer step for each mini-batch of an RL step." in text
    assert "Prompts (= groups) per step. [int >= 1, count; default 16]" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.learning_rate", "fast"], "trainer.learning_rate = 'fast': "),
        (["--sampling.group_size", "1"], "sampling.group_size 1 with advantage 'grpo'"),
        (["--evaluation.pass_at_k", "[8]"], "evaluation.pass_at_k 8 needs as many samples or more"),
        (["--evaluation.pass_at_k", "[]"], "evaluation.num_samples 4 without pass_at_k"),
        (["--evaluation.every", "0", "--evaluation.patience", "2"], "evaluation.patience 2 needs evaluations"),
        (
            ["--evaluation.max_output_tokens", "400"],
            "data.max_prompt_tokens 128 + evaluation.max_output_tokens 400 = 528 is more than",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolved(arguments)
    assert str(caught.value).startswith(message)


def test_an_option_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        resolved(["--trainer.learning_rat", "1"])
    assert "--trainer.learning_rat" in capsys.readouterr().err
