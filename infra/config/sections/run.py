"""What an experiment is. A RunConfig is a flow parameter, a form in the Prefect UI and a file beside the results.

What this machine is (paths, ports, GPUs, secrets) is `infra.settings`; the two never mix. Each section goes whole to the tasks
that use it and is part of their cache key, so a value belongs to the section whose results it changes.
"""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from infra.config.sections.batch import BatchConfig, DataConfig, DataPart, RewardConfig, SamplingConfig
from infra.config.sections.engine import SLOWEST_TOKENS_PER_S, EngineConfig
from infra.config.sections.evaluation import EvaluationConfig, Exam
from infra.config.sections.trainer import TrainerConfig
from infra.config.tools.base import Section

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
NAME_PATTERN = rf"^{RUN_NAME.pattern}$(?!\n)"
"""The same for a JSON schema, such as that of Prefect's form. `$` alone lets a line break at the end pass in Python."""
NameInForm = Annotated[str, Field(json_schema_extra={"pattern": NAME_PATTERN})]
"""A name that the form refuses before a flow run is made. Validators say in words what is wrong, hence no Field(pattern=...)."""


def checked_name(name: str, what: str) -> str:
    """Raises ValueError for a name that cannot be that of a folder and part of a URL."""
    if not RUN_NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} must be 1 to 80 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    return name


class RetentionConfig(Section):
    """Which adapter versions stay on the disk. The latest one always does, with its optimizer state: the next step needs both."""

    keep_last: int | None = Field(default=None, ge=1)
    """The latest so many versions stay whole; None: all do, and nothing is ever removed."""
    keep_every: int = Field(default=0, ge=0)
    """Each version that is a multiple of this stays whole too; 0: none."""
    keep_best: bool = True
    """The version with the best evaluation stays whole too."""
    of_others: Literal["adapter", "nothing"] = "adapter"
    """What stays of all other versions. adapter: without optimizer state, it can be served but not trained on."""


class ExportConfig(Section):
    """What a run leaves in its folder `export` when it ends."""

    what: Literal["nothing", "adapter", "merged"] = "adapter"
    """adapter: a PEFT folder; merged: besides, a Hugging Face folder of the base model with the adapter in its weights."""
    which: Literal["best", "latest"] = "best"
    """best: by pass@1; without evaluations the latest."""


class TrackingConfig(Section):
    experiment: NameInForm = "ratchet"
    """MLflow experiment; also names a folder of artifacts, so it is written as the name of a run."""
    sweep: str = ""
    """Name that the runs of a sweep share; a tag in MLflow. Empty: the run belongs to none."""
    num_samples_shown: int = Field(default=8, ge=0)
    """Samples in the table artifact of each step."""

    @field_validator("experiment")
    @classmethod
    def _experiment_is_a_folder_name(cls, name: str) -> str:
        return checked_name(name, "experiment")


class RunConfig(Section):
    """One training run."""

    name: NameInForm = "run"
    """Names the run's folder and its MLflow run: 1 to 80 letters, digits, '.', '_' or '-', beginning with a letter or digit."""
    model: str = "tiny"
    """`tiny`, `tiny-moe` or, on a GPU, `small` (made here when missing), a Hugging Face folder, or a hub id."""
    seed: int = 0
    num_steps: int = Field(default=20, ge=1)
    """RL steps of the whole run; a run that has fewer goes on up to here."""
    data: DataConfig = DataConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    batch: BatchConfig = BatchConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    retention: RetentionConfig = RetentionConfig()
    export: ExportConfig = ExportConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def training(self) -> DataPart:
        """The rows to train on: of a single file those that evaluations do not ask."""
        part = {"part": "training", "num_held_out": self._num_held_out} if self._num_held_out else {}
        return DataPart.model_validate(dict(self.data) | part)

    @property
    def _asks_own_file(self) -> bool:
        """Whether evaluations ask questions of the single file that is trained on."""
        asked = self.evaluation.source or self.data.source
        return self.data.is_single_file and Path(asked).expanduser().resolve() == Path(self.data.source).expanduser().resolve()

    @property
    def _num_held_out(self) -> int:
        return self.evaluation.num_prompts if self.evaluation.every and self._asks_own_file else 0

    @property
    def exam(self) -> Exam:
        """What an evaluation of this run measures; when it does, and what follows, is no part of it."""
        asked = self.evaluation
        elsewhere = {"source": asked.source, "subset": asked.subset} if asked.source else {}
        held_out = {"part": "held_out", "num_held_out": self._num_held_out} if self._asks_own_file else {}
        fields = {"split": asked.split, "num_prompts": asked.num_prompts, "num_spare_prompts": 0, "partial_rollouts": False}
        return Exam(
            data=DataPart.model_validate(dict(self.data) | fields | elsewhere | held_out),
            reward=self.reward.but(shuffle_seed=None),
            pass_reward=asked.pass_reward,
            max_output_tokens=asked.max_output_tokens or self.sampling.max_output_tokens,
            num_samples=asked.num_samples,
            temperature=asked.temperature,
            pass_at_k=tuple(sorted(set(asked.pass_at_k))),
        )

    @field_validator("name")
    @classmethod
    def _name_is_a_folder_name(cls, name: str) -> str:
        return checked_name(name, "run name")

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        self._check_groups()
        if self.data.num_spare_prompts and self.engine.deterministic:
            raise ValueError(
                f"data.num_spare_prompts {self.data.num_spare_prompts} with engine.deterministic: which groups are whole first is a matter "
                "of timing, so no rollout of it can be made again; set engine.deterministic to false (a replay takes the samples over)"
            )
        self._check_partial_rollouts()
        self._check_patience()
        retention = self.retention
        if self.trainer.loss.correction.max_age and retention.keep_last == 1 and retention.of_others == "nothing":
            raise ValueError(
                "retention.keep_last 1 with of_others 'nothing' removes the adapter that trainer.loss.correction.max_age 1 still samples from: "
                "keep 2, or of_others 'adapter'"
            )
        kl = self.trainer.loss.kl
        if self.batch.mask_truncated and kl.where == "reward" and kl.coefficient:
            raise ValueError(
                f"batch.mask_truncated with trainer.loss.kl.where 'reward' (coefficient {kl.coefficient:g}): a sample without loss tokens pays no "
                "KL, and its reward counts in its group all the same, so that being cut off would be rewarded; take kl.where 'loss', or leave one out"
            )
        is_best_asked = self.export.what != "nothing" and self.export.which == "best" and self.evaluation.every
        if is_best_asked and retention.keep_last and not retention.keep_best and retention.of_others == "nothing":
            raise ValueError(
                "export.which 'best' with retention.keep_best false and of_others 'nothing': the best adapter may be gone when the run ends; "
                "keep it, or export the latest"
            )
        longest = self.data.max_prompt_tokens + self.sampling.max_output_tokens
        if longest > self.engine.max_context_tokens:
            raise ValueError(
                f"data.max_prompt_tokens {self.data.max_prompt_tokens} + sampling.max_output_tokens "
                f"{self.sampling.max_output_tokens} = {longest} is more than engine.max_context_tokens {self.engine.max_context_tokens}"
            )
        asked = self.data.max_prompt_tokens + (self.evaluation.max_output_tokens or 0)
        if asked > self.engine.max_context_tokens:
            raise ValueError(
                f"data.max_prompt_tokens {self.data.max_prompt_tokens} + evaluation.max_output_tokens "
                f"{self.evaluation.max_output_tokens} = {asked} is more than engine.max_context_tokens {self.engine.max_context_tokens}"
            )
        if longest > self.trainer.max_tokens_per_microbatch:
            raise ValueError(
                f"a sequence may have {longest} tokens (data.max_prompt_tokens + sampling.max_output_tokens), more than "
                f"trainer.max_tokens_per_microbatch {self.trainer.max_tokens_per_microbatch}"
            )
        if self.trainer.lora.rank > self.engine.max_lora_rank:
            raise ValueError(
                f"trainer.lora.rank {self.trainer.lora.rank} is above the engine's maximum, engine.max_lora_rank {self.engine.max_lora_rank}"
            )
        return self

    def _check_patience(self) -> None:
        """A sample of full length has to fit into the engine's silence."""
        lengths = {"sampling.max_output_tokens": self.sampling.max_output_tokens}
        if self.evaluation.every:
            lengths["evaluation.max_output_tokens"] = self.evaluation.max_output_tokens or 0
        field, longest = max(lengths.items(), key=lambda each: each[1])
        if self.engine.request_timeout_s < (least := longest / SLOWEST_TOKENS_PER_S):
            raise ValueError(
                f"engine.request_timeout_s {self.engine.request_timeout_s:g} with {field} {longest}: at {SLOWEST_TOKENS_PER_S:g} tokens a second "
                f"one answer takes {least:g} s; set it to that or more"
            )

    def _check_partial_rollouts(self) -> None:
        data, correction = self.data, self.trainer.loss.correction
        if not data.partial_rollouts:
            return
        if not 0 < data.num_spare_prompts <= data.num_prompts:
            raise ValueError(
                f"data.partial_rollouts with data.num_spare_prompts {data.num_spare_prompts}: so many groups are broken off in each step and have to "
                f"become whole in the next, take 1 to data.num_prompts {data.num_prompts}"
            )
        if correction.kind == "none":
            raise ValueError(
                "data.partial_rollouts with trainer.loss.correction.kind 'none': tokens of an older adapter need a correction, set mode to "
                "'decoupled' and kind to 'tis', 'mis' or 'icepop'"
            )
        if correction.max_age:
            raise ValueError(
                f"data.partial_rollouts with trainer.loss.correction.max_age {correction.max_age}: what goes on would be two steps old, "
                "take one of the two"
            )
        if self.engine.kind == "vllm":
            raise ValueError(
                "data.partial_rollouts with engine.kind 'vllm': it gives nothing of an answer that is broken off; take 'sglang'"
            )

    def _check_groups(self) -> None:
        size, batch = self.sampling.group_size, self.batch
        if size < 2 and batch.advantage != "reinforce_pp":
            raise ValueError(
                f"sampling.group_size {size} with advantage {batch.advantage!r}: a group needs 2 samples "
                "or more, one alone has nothing to be compared with"
            )
        if size < 2 and batch.drop_flat_groups:
            raise ValueError(
                f"sampling.group_size {size} with batch.drop_flat_groups: a group of one is always flat, take 2 or more"
            )
        if batch.max_groups is not None and batch.max_groups > self.data.num_prompts:
            raise ValueError(
                f"batch.max_groups {batch.max_groups} is above data.num_prompts {self.data.num_prompts}: draw as many or more"
            )
        if self.trainer.num_minibatches > self.data.num_prompts:
            raise ValueError(
                f"trainer.num_minibatches {self.trainer.num_minibatches} is above the number of groups, data.num_prompts {self.data.num_prompts}"
            )
        if batch.max_groups is not None and self.trainer.num_minibatches > batch.max_groups:
            raise ValueError(
                f"trainer.num_minibatches {self.trainer.num_minibatches} is above batch.max_groups {batch.max_groups}"
            )
        longest = batch.overlong.max_output_tokens
        if longest is not None and longest > self.sampling.max_output_tokens:
            raise ValueError(
                f"batch.overlong.max_output_tokens {longest} is above sampling.max_output_tokens {self.sampling.max_output_tokens}: "
                "no sample is that long"
            )
