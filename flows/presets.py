"""Named runs: a preset is a function that returns a RunConfig; a variant changes what differs."""

from collections.abc import Callable

from infra.config import (
    DataConfig,
    EngineConfig,
    EnvironmentConfig,
    EvaluationConfig,
    ExportConfig,
    KlConfig,
    LoraConfig,
    LossConfig,
    RetentionConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)
from infra.config.tools.overrides import nearest
from infra.settings import CHECKOUT, Settings, settings

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""As in verl-project/verl, examples/data_preprocess/gsm8k.py at 1dda039."""


def arithmetic() -> RunConfig:
    """The tiny model on generated word problems, on two CPU cores; docs/results/learning.md says how well it learns."""
    return RunConfig(
        name="arithmetic",
        data=DataConfig(num_prompts=32, max_prompt_tokens=128),
        sampling=SamplingConfig(group_size=8, max_output_tokens=48),
        trainer=TrainerConfig(learning_rate=2e-3),
        evaluation=EvaluationConfig(num_prompts=128, num_samples=4, pass_at_k=(1, 4)),
    )


def arithmetic_gpu() -> RunConfig:
    """The same with a model of 83 million parameters, made on the GPU first (docs/results/learning-gpu.md says how well it learns)."""
    base = arithmetic()
    return base.but(
        name="arithmetic-gpu",
        model="small",
        data=base.data.but(num_prompts=64),
        engine=base.engine.but(max_running_requests=256),
        trainer=base.trainer.but(learning_rate=5e-4),
        evaluation=base.evaluation.but(num_prompts=256),
    )


def smoke() -> RunConfig:
    """As small as shows everything: two steps of 16 prompts, evaluated before and after; a minute or two on two CPU cores."""
    base = arithmetic()
    return base.but(
        name="smoke",
        num_steps=2,
        data=base.data.but(num_prompts=16),
        trainer=TrainerConfig(learning_rate=1e-3),
        evaluation=EvaluationConfig(every=2, num_prompts=32),
    )


def calculator() -> RunConfig:
    """The tiny model with a calculator, in episodes of one to four turns, on two CPU cores; docs/results/agents.md says how well it learns."""
    base = arithmetic()
    return base.but(
        name="calculator",
        num_steps=16,
        data=base.data.but(num_prompts=16),
        trainer=base.trainer.but(learning_rate=3e-3),
        environment=EnvironmentConfig(name="infra.environments.examples.calculator.Calculator", max_turns=4),
        evaluation=EvaluationConfig(every=16, num_prompts=64),
    )


def calculator_taskset() -> RunConfig:
    """The same game as a taskset of verifiers, which runs in verifiers' own environment; see docs/how-to/verifiers.md."""
    base, taskset = calculator(), CHECKOUT / "infra/environments/examples/calculator_taskset"
    return base.but(
        name="calculator-taskset",
        data=base.data.but(source=f"verifiers:{taskset}"),
        environment=EnvironmentConfig(kind="verifiers", id=str(taskset), max_turns=4, workers=4),
    )


def tools() -> RunConfig:
    """The same with the calculator as a tool, each call of which is on record; it learns as the preset calculator does."""
    base = calculator()
    return base.but(
        name="tools",
        environment=base.environment.but(name="infra.environments.examples.calculator_tool.CalculatorTool", tool_timeout_s=5.0),
    )


def digits() -> RunConfig:
    """The tiny model in a game of three turns with a reward for each, on two CPU cores; docs/results/agents.md says how well it learns."""
    base = calculator()
    return base.but(
        name="digits",
        num_steps=12,
        sampling=base.sampling.but(max_output_tokens=16),
        batch=base.batch.but(advantage_level="turn"),
        environment=base.environment.but(name="infra.environments.examples.digits.Digits"),
        evaluation=base.evaluation.but(every=12),
    )


def program() -> RunConfig:
    """The tiny model in an agent of 40 lines that knows only OpenAI's package, which is in SGLang's environment; on two CPU cores. Each
    episode starts a Python, so there are fewer than with calculator."""
    base = calculator()
    agent = CHECKOUT / "infra/environments/examples/openai_agent.py"
    try:
        python = settings().sglang_python
    except ValueError:  # `ratchet presets` lists this one too where a setting is wrong
        python = Settings.model_fields["sglang_python"].default
    return base.but(
        name="program",
        num_steps=12,
        data=base.data.but(num_prompts=8),
        environment=EnvironmentConfig(command=(str(python), str(agent)), workers=4),
        evaluation=base.evaluation.but(every=12, num_prompts=32),
    )


def gsm8k_qwen25_05b() -> RunConfig:
    """Qwen2.5-0.5B-Instruct on GSM8K, GRPO with LoRA of rank 32, one epoch of 116 steps; made for one GPU, not yet run with real weights.

    The values of verl's published run: base 49.6, at the end 54.3 (greedy, strict `####` answers, all 1,319 test questions).
    Table: verl-project/verl, docs/algo/baseline.md at 1dda039. Script and log: eric-haibin-lin/verl-data,
    gsm8k/Qwen2.5-0.5B-bsz64_2-prompt512-resp1024-lorarank32-score0.543.log at bf76ddd. There on 2 GPUs: 64 prompts, 5 samples
    each, one optimizer step; learning rate 3e-5, constant; KL loss (k3) 0.001, entropy bonus 0.001, clip 0.2, dual clip 3,
    weight decay 0.01, Adam (0.9, 0.999), rank and alpha 32 on all linear layers. Prompts are shuffled here, there they are not.
    """
    lora = LoraConfig(rank=32, alpha=32)
    loss = LossConfig(
        clip_low=0.2, clip_high=0.2, dual_clip=3.0, kl=KlConfig(coefficient=0.001, estimator="k3"), entropy_bonus=0.001
    )
    return RunConfig(
        name="gsm8k-qwen2.5-0.5b",
        model="Qwen/Qwen2.5-0.5B-Instruct",
        num_steps=116,
        data=DataConfig(
            source="openai/gsm8k",
            subset="main",
            instruction=GSM8K_INSTRUCTION,
            num_prompts=64,
            max_prompt_tokens=512,
            too_long="drop",
        ),
        engine=EngineConfig(max_context_tokens=1536, max_running_requests=320, max_lora_rank=32, deterministic=False),
        sampling=SamplingConfig(group_size=5, max_output_tokens=1024),
        reward=RewardConfig(name="gsm8k_verl_strict"),
        trainer=TrainerConfig(lora=lora, loss=loss, learning_rate=3e-5, weight_decay=0.01, adam_beta2=0.999),
        evaluation=EvaluationConfig(every=10, num_prompts=1319),
        retention=RetentionConfig(keep_last=3, keep_every=20),
        export=ExportConfig(what="merged"),
    )


def gsm8k_qwen25_15b() -> RunConfig:
    """Qwen2.5-1.5B-Instruct: the published run has the values of the 0.5B one and ends at 77.9.

    gsm8k/Qwen2.5-1.5B-bsz64_2-prompt512-resp1024-lorarank32-score0.779.log at cc49946, of the same repository.
    """
    return gsm8k_qwen25_05b().but(name="gsm8k-qwen2.5-1.5b", model="Qwen/Qwen2.5-1.5B-Instruct")


def gsm8k_qwen25_7b() -> RunConfig:
    """Qwen2.5-7B-Instruct: the published run has the values of the 0.5B one, on 8 GPUs, and ends at 93.4. On one GPU here.

    gsm8k/Qwen2.5-7B-bsz64_8-prompt512-resp1024-lorarank32-score0.934.log at cc49946, of the same repository.
    """
    base = gsm8k_qwen25_05b()
    return base.but(name="gsm8k-qwen2.5-7b", model="Qwen/Qwen2.5-7B-Instruct", trainer=base.trainer.but(recompute=True))


PRESETS: dict[str, Callable[[], RunConfig]] = {
    "arithmetic": arithmetic,
    "arithmetic-gpu": arithmetic_gpu,
    "smoke": smoke,
    "calculator": calculator,
    "calculator-taskset": calculator_taskset,
    "tools": tools,
    "digits": digits,
    "program": program,
    "gsm8k": gsm8k_qwen25_05b,
    "gsm8k-qwen2.5-0.5b": gsm8k_qwen25_05b,
    "gsm8k-qwen2.5-1.5b": gsm8k_qwen25_15b,
    "gsm8k-qwen2.5-7b": gsm8k_qwen25_7b,
}


def preset(name: str) -> RunConfig:
    """Raises ValueError for an unknown name; lists those that are known."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown{nearest(name, PRESETS)}; known are {', '.join(PRESETS)}")
    return PRESETS[name]()
