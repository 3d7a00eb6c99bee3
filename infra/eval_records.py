"""What evaluations, comparisons of adapters and whole runs came to."""

from typing import Literal

from pydantic import Field

from infra.records import AdapterVersion, File, Record, StepRecord


class Interval(Record):
    """A mean over questions with its 95% confidence interval; see infra/runs/eval_figures.py."""

    mean: float
    standard_error: float
    num_questions: int

    @property
    def low(self) -> float:
        return self.mean - Z_95 * self.standard_error

    @property
    def high(self) -> float:
        return self.mean + Z_95 * self.standard_error


Z_95 = 1.959964
"""Half the width of the 95% interval of a normal distribution, in standard errors."""


class Evaluation(StepRecord):
    """Evaluation of one adapter version on one set; `step` is that version, the number of RL steps it has seen."""

    set_name: str = ""
    """Empty where the run has only the set of the section `evaluation`."""
    adapter_sha256: str
    eval_digest: str
    """Digest of the evaluation's configuration. Figures of evaluations with equal digests can be compared."""
    dataset_fingerprint: str = ""
    """SHA-256 over all rows of the questions' data set; equal in all evaluations of a run with one digest. Empty: of an older version."""
    reward_source: str = ""
    """Digest of the user's code that gave the rewards. Figures of evaluations with other ones cannot be compared. Empty: none, or not recorded."""
    file: File
    """The greedy answers, or the sampled ones where no greedy ones were asked for. The others and `evaluation.json`, which holds this record, lie in
    the same folder."""
    num_prompts: int
    num_overlapping: int
    """Number of these questions that are in the training set too."""
    pass_at_1: float
    """Share of questions whose greedy answer passes; without greedy answers the mean share of a question's sampled answers that pass."""
    pass_at_k: dict[str, float]
    """By k, of the sampled answers; the unbiased estimate."""
    truncated_frac: float
    """Of the greedy answers; here and in the next fields of the sampled ones where there are no greedy ones."""
    mean_reward: float | None = None
    """Mean reward of the greedy answers. None here and in the next three fields: written by an older version."""
    max_reward: float | None = None
    """The highest of all answers, greedy and sampled."""
    mean_output_tokens: float | None = None
    """Tokens sampled, of the greedy answers."""
    is_binary: bool | None = None
    """Whether each answer, greedy and sampled, has a reward of 0 or 1."""
    reward_interval: Interval | None = None
    """Of mean_reward; None for fewer than two questions."""
    mean_at_n: Interval | None = None
    """Mean over questions of the mean reward of their sampled answers; None where none are asked for."""
    num_samples: int = 0
    """Sampled answers to a question."""
    part_means: dict[str, float] = Field(default_factory=dict)
    """Mean of each part of the reward over the greedy answers; empty where the reward returned plain numbers."""
    task_metrics: dict[str, float] = Field(default_factory=dict)
    """Of an inspect-ai task, its own figures over the greedy answers, by scorer/metric."""
    num_answers: int = 0
    """Answers, greedy and sampled. 0: written by an older version."""
    num_unjudged: int = 0
    """Answers, greedy and sampled, that could not be judged. No figure counts them."""
    num_unjudged_questions: int = 0
    """Questions of which no answer could be judged."""
    mean_turns: float | None = None
    """Turns of an episode, of the answers as in truncated_frac; None without an environment."""
    is_eligible: bool = True
    """Whether few enough answers are unjudged for choosing the best adapter and for comparing."""

    @property
    def figures(self) -> dict[str, float]:
        """By their names, without the set's. The sampled pass@1 is another figure than the greedy one."""
        sampled = {f"{'sampled_' if k == '1' else ''}pass_at_{k}": value for k, value in self.pass_at_k.items()}
        found = {"pass_at_1": self.pass_at_1, **sampled, "truncated_frac": self.truncated_frac}
        means = {"mean_reward": self.mean_reward, "mean_output_tokens": self.mean_output_tokens, "mean_turns": self.mean_turns}
        found |= {name: value for name, value in means.items() if value is not None}
        found |= _bounds("mean_reward", self.reward_interval)
        if self.mean_at_n:
            name = f"mean_at_{self.num_samples}"
            found |= {name: self.mean_at_n.mean} | _bounds(name, self.mean_at_n)
        found |= {f"parts/{name}": value for name, value in self.part_means.items()}
        found |= {f"inspect/{name}": value for name, value in self.task_metrics.items()}
        if self.num_unjudged:
            found |= {"unjudged": float(self.num_unjudged)}
            found |= {"unjudged_frac": self.num_unjudged / self.num_answers} if self.num_answers else {}
        return found

    @property
    def prefix(self) -> str:
        """The beginning of its metrics' names in MLflow."""
        return f"eval/{self.set_name}/" if self.set_name else "eval/"

    @property
    def metrics(self) -> dict[str, float]:
        """By their names in MLflow."""
        return {f"{self.prefix}{name}": value for name, value in self.figures.items()}


def _bounds(name: str, interval: Interval | None) -> dict[str, float]:
    return {f"{name}_low": interval.low, f"{name}_high": interval.high} if interval else {}


class Difference(Record):
    """What two adapters differ by on one set, the second minus the first, paired by question."""

    set_name: str
    first: str
    second: str
    """Names of the adapters' evaluations."""
    reward: Interval | None
    """Of the rewards: of a question's sampled answers the mean, or of its greedy answer where none are sampled. None: fewer than two questions have
    judged answers of both."""
    passed: Interval | None
    """Of the shares of these answers that pass."""


class EvaluationReport(Record):
    """The evaluations of one adapter, and what it differs by from another one."""

    evaluations: tuple[Evaluation, ...]
    """One for each set, in the order of the configuration."""
    against: tuple[Evaluation, ...] = ()
    """Of the other adapter."""
    differences: tuple[Difference, ...] = ()


class UnusedSamples(Record):
    """Samples that were sampled and that no committed step was trained on; see infra/runs/accounting/unused.py."""

    num_waiting: int = 0
    """Whole samples in the folders of steps that are not committed."""
    num_carried_over: int = 0
    """Whole samples and prefixes that the last step carried over."""
    num_dropped: int = 0
    """Samples over-sampled and not taken, or made again: by a rollout with other inputs, or after a wrong answer."""
    num_prompts: int = 0
    """Prompts none of whose samples was trained on."""

    @property
    def line(self) -> str:
        """One line for people; empty where all samples were trained on."""
        counts = {
            "wait in steps that are not committed": self.num_waiting,
            "were carried over by the last step": self.num_carried_over,
        }
        counts["were dropped or made again"] = self.num_dropped
        parts = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        if not parts:
            return ""
        return f"{sum(counts.values())} samples were not trained on, of {self.num_prompts} prompts nothing: {parts}"


class RunReport(Record):
    """What a run came to."""

    run: str
    num_steps: int
    """Committed."""
    stopped: Literal["all steps made", "asked to stop", "no progress"]
    latest: AdapterVersion
    best: AdapterVersion
    """By evaluation.best_by; the latest where nothing was evaluated."""
    evaluations: tuple[Evaluation, ...]
    """Evaluations with the run's own configuration, by version: of the set by which the best adapter is chosen."""
    others: tuple[Evaluation, ...] = ()
    """Those of the run's other sets, set by set."""
    unused: UnusedSamples = UnusedSamples()

    @property
    def outcome(self) -> str:
        """As `20 steps, all steps made`."""
        return f"{self.num_steps} {'step' if self.num_steps == 1 else 'steps'}, {self.stopped}"
