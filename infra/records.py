"""The nouns that tasks pass to each other: receipts, not payloads.

A record says where the work lies, what its digest is and how much of it there is. It is also a cache key, so nothing in it
may differ between two identical runs: no time, pid, port, host or duration.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

FinishReason = Literal["stop", "length", "abort", "error"]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class File(Record):
    """A file of the workspace as it was when it was written."""

    path: str
    """Relative to the workspace, with forward slashes."""
    sha256: str
    num_bytes: int

    @field_validator("path")
    @classmethod
    def _stays_in_the_workspace(cls, path: str) -> str:
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"path {path!r} of a recorded file must be relative to the workspace and stay in it")
        return path


class ProgramRan(Record):
    """What a program computed with: two runs with equal ones may be compared bit by bit."""

    versions: dict[str, str]
    """Of Python and of packages in the program's own environment, of the CUDA that its torch was built for; on a GPU also the GPUs' name (gpu)
    and the driver's version (driver), as reported by NVML."""
    backends: dict[str, str]
    """The running program's attention and LoRA kernels and other reported settings; empty if it reports none."""


class EngineRan(ProgramRan):
    """What the samples came from."""

    kind: str
    identity: str
    """Digest of model, flags and versions."""
    flags: tuple[str, ...]


class TrainerRan(ProgramRan):
    """What made the next adapter."""


class BaseModelRef(Record):
    """The frozen language model under the adapters."""

    id: str
    """As the user named it: `tiny`, a folder, or a Hugging Face hub id."""
    sha256: str
    """Over its config, tokenizer and weights; see `infra.models.base_model.digest`."""


class Step(Record):
    """One step of one run; step k uses adapter k and makes adapter k+1."""

    run: str
    index: int
    seed: int
    first_step: int = 0
    """Index of the run's first step, >= 0; above 0 only in a run that begins with the replay of a later step."""
    draw: int = 0
    """With dynamic sampling: one of the step's draws, from 1, with files of its own. 0: the step itself."""


class StepRecord(Record):
    run: str
    step: int
    draw: int = 0
    """As Step.draw."""


class AdapterVersion(Record):
    run: str
    version: int
    """RL steps taken; 0 is the base model, which has no adapter files, or the adapter that the run started from (trainer.lora.start_from)."""
    num_optimizer_steps: int = 0
    """Taken by the optimizer on the way: more than version where a step has several mini-batches."""
    base: BaseModelRef
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    seed: int
    """Of the first values of the LoRA matrices."""
    weights: File | None = None
    """`adapter_model.safetensors` of a folder in Hugging Face PEFT layout."""
    adapter_config: File | None = None
    """`adapter_config.json` beside it: rank, alpha and targets, as PEFT and the engine read them."""
    exp_avg: File | None = None
    exp_avg_sq: File | None = None
    """Adam's moments, from which training resumes; see `infra.megatron.protocol.optimizer_files`."""
    optimizer: File | None = None
    """Instead of the two: both moments in one file, as an earlier version of Ratchet wrote them."""
    engine_weights: File | None = None
    """The same weights with a layer's experts stacked, in the type that the trainer computes in; of adapters on the experts of a mixture. An
    engine loads them faster. They can always be done without: no other file depends on them."""
    canary: File | None = None
    """Log-probabilities that the trainer gives this adapter; the engine that serves it must give the same."""

    @model_validator(mode="after")
    def _has_a_whole_state(self) -> Self:
        if self.moments.keys() not in (set(), {"exp_avg", "exp_avg_sq"}, {"optimizer"}):
            raise ValueError(
                f"adapter {self.version} of run {self.run!r} has {' and '.join(self.moments)}: exp_avg and exp_avg_sq belong together, "
                "or optimizer alone"
            )
        return self

    @property
    def moments(self) -> dict[str, File]:
        """The optimizer's state, by field; empty where there is none."""
        files = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "optimizer": self.optimizer}
        return {name: file for name, file in files.items() if file}

    @property
    def files(self) -> list[File]:
        """All files of the adapter."""
        return [file for file in (self.weights, self.adapter_config, *self.moments.values(), self.canary) if file]

    @property
    def sha256(self) -> str:
        """Of the adapter's weights; `base` where there are none."""
        return self.weights.sha256 if self.weights else "base"

    @property
    def served_name(self) -> str | None:
        """The name under which an engine serves it: one name for one content, for ever. None is the base model."""
        return f"{self.run}-v{self.version:06d}-{self.sha256[:12]}" if self.weights else None


class RowCounts(Record):
    """What became of a data set's rows."""

    num_rows: int
    """Rows that meet data.filter."""
    num_filtered: int = 0
    """Further rows, which data.filter leaves out."""
    num_held_out: int = 0
    """Rows that are held out for evaluations."""
    num_contaminated: int = 0
    """Rows that are not trained on because an evaluation's data set has their text."""
    num_too_long: int = 0
    """Rows whose prompts have more than data.max_prompt_tokens; they are left out, or cut."""
    num_sharing_13_words: int = 0
    """Rows that are trained on and share 13 words in a row with a text of the evaluation's data set; 0 for generated data."""

    @property
    def metrics(self) -> dict[str, float]:
        """By their names in MLflow."""
        return {f"data/{name.removeprefix('num_')}{'' if name == 'num_rows' else '_rows'}": value for name, value in self}


class PromptBatch(StepRecord):
    file: File
    num_prompts: int
    num_oversampled_prompts: int = 0
    """Prompts that the rollout may leave out: it ends when all other groups are complete."""
    partial_rollouts: bool = False
    """The next step resumes aborted samples."""
    num_begun_prompts: int = 0
    """The first of them were aborted in the step before; no rollout is whole without them."""
    begun_engine_versions: str = ""
    """Versions of the engine that sampled `begun`, in one line."""
    begun: File | None = None
    """What the step before has sampled of them; see CarriedOver."""
    dataset_fingerprint: str
    """SHA-256 over all rows of the data set that prompts are drawn from; see `infra.data.dataset.fingerprint`."""
    first_row: int
    """Position of the first prompt that is drawn here in the shuffled, endlessly repeated data set."""
    rows: RowCounts | None = None
    """What became of the data set's rows; None: not counted."""
    draws: File | None = None
    """With dynamic sampling: all groups of all draws, which of them the step has, and why the others were dropped."""
    draw_counts: dict[str, float] = {}
    """Figures of these draws and of the curriculum, by name."""
    pass_rates: File | None = None
    """With a curriculum: the pass rates that decided which rows were drawn."""


class ScoredBefore(Record):
    """What a step's curriculum knows: the rates of the step before, and the groups that were scored there."""

    pass_rates: File | None = None
    """None: none were measured before that step."""
    prompts: File | None = None
    groups: File | None = None
    """Scored samples, or the groups of all draws. None: there was no step before."""


class CarriedOver(Record):
    """Groups that a step's rollout has aborted; the next step resumes them."""

    prompts: File
    """Of that step; theirs are among them."""
    prompt_ids: tuple[int, ...]
    samples: File
    """Finished ones and, with finish_reason `abort`, prefixes; of some there may be nothing."""
    engine_versions: str = ""
    """Versions of the engine that sampled them, in one line."""


class AdapterSwitch(Record):
    """When a rollout goes on with a newer adapter: as soon as the step that makes that adapter is committed."""

    run: str
    made_by_step: int
    pause_at: int
    """Tokens of each answer that the first adapter samples, with engine.deterministic. 0: as many as it has when the newer one comes."""


class Rollouts(StepRecord):
    adapter_version: int
    """The policy that sampled; 0 is the base model."""
    adapter_sha256: str
    file: File
    num_prompts: int
    group_size: int
    temperature: float
    """At which they were sampled; their log-probabilities are of that distribution."""
    num_samples: int
    """Episodes, where there is an environment: one may have several trajectories."""
    num_output_tokens: int
    num_truncated: int
    num_older_tokens: int = 0
    """Number of output tokens that an older adapter sampled: that of the step before, or the one before an in-flight update."""
    left_over: CarriedOver | None = None
    """With partial rollouts."""
    is_judged: bool = False
    """Whether an environment has given the rewards."""
    num_turns: int = 0
    """Turns of all episodes; 0 without an environment."""
    num_given_tokens: int = 0
    """Tokens between sampled ones that the samples were given."""
    num_retracted: int = 0
    """With trainer.routing_replay: samples whose requests the engine retracted. They have no routes and are not trained on."""


class ScoredRollouts(StepRecord):
    adapter_version: int
    adapter_sha256: str
    file: File
    num_prompts: int
    group_size: int
    temperature: float
    num_samples: int
    mean_reward: float
    std_reward: float
    num_trainable_groups: int
    """Groups whose rewards are not all equal; the others teach nothing."""
    part_means: dict[str, float] = {}
    """By the part's name, over the samples that have it; empty where the reward returned plain numbers."""
    part_stds: dict[str, float] = {}
    """As part_means: the population's standard deviation."""
    num_unjudged: dict[str, int] = {}
    """Samples that could not be judged, by reason. They are in no other figure, and are not trained on."""
    num_unjudged_groups: int = 0
    """Groups with fewer than two judged samples; they teach nothing."""
    judgements: File | None = None
    """Answers of the model that judged. None: no model did."""
    reward_source: str = ""
    """Digests of the rewards' sources that gave the scores; of several draws all that there are."""


class Draw(Record):
    """A draw of dynamic sampling, or what a step has of all its draws."""

    prompts: PromptBatch
    rollouts: Rollouts
    scored: ScoredRollouts


class Draws(Record):
    """The draws of a step, in their order."""

    draws: tuple[Draw, ...]


class TrainBatch(StepRecord):
    adapter_version: int
    adapter_sha256: str
    file: File
    num_sequences: int
    num_tokens: int
    num_loss_tokens: int
    num_dropped_groups: int = 0
    """Groups of equal rewards that were left out."""
    samples: File | None = None
    """The same sequences as rows of samples with their advantages, for people."""


class StepReport(StepRecord):
    adapter: AdapterVersion
    metrics: dict[str, float]
