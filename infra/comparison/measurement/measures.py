"""What is measured of an engine: at its start, and in each step. Plain JSON, a file each, written when it is whole."""

from collections.abc import Sequence
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from infra.comparison.config import Backend
from infra.comparison.measurement.memory import PhaseMemory
from infra.engines.request_timing import RequestTiming

PASSED = "passed"


class Measures(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Provenance(Measures):
    """Where a block's figures come from, besides model and options."""

    machine: str
    """Its kind: `1 x NVIDIA H200`."""
    unit: str
    """Which one: UUIDs of its GPUs, or the host's name where there is none."""
    code: str
    """Digest of the code that measures."""
    locks: str
    """Digest of all locks."""

    def differences(self, there: "Provenance") -> list[str]:
        """All in which the other one's figures may not stand beside ours, in words; which unit it was is none."""
        pairs = ((name, getattr(there, name), getattr(self, name)) for name in ("machine", "code", "locks"))
        return [f"{name} {theirs} (here: {ours})" for name, theirs, ours in pairs if theirs != ours]


class EngineStart(Measures):
    """Of one engine in one round."""

    backend: Backend
    round: int
    start_s: float
    """From the command to the first answer, checks not counted."""
    version: str
    """By the server's own word."""
    flags: tuple[str, ...]
    colocation: str
    reason: str
    log_path: str
    memory_before_gib: float
    """In use when the engine was started: what earlier engines left shows here."""
    kv_pool_tokens: int
    wait_s: float = 0.0
    """Before the command, until the memory was free."""
    load_s: float = 0.0
    """Of the first adapter."""
    warm_up_s: float = 0.0
    checks_s: float = 0.0
    """Golden checks and canaries, which no other figure holds."""
    origin: Provenance | None = None
    """None in figures from before it was recorded."""
    num_starts: int = 1
    """Above 1 where the comparison was interrupted, or an engine had to be replaced."""

    @property
    def is_twin(self) -> bool:
        return "twin" in self.version


class Quality(Measures):
    """Of answers with free length."""

    num_samples: int
    mean_output_tokens: float
    mean_reward: float
    truncated_frac: float


class Probe(Measures):
    """Log-probabilities of a fixed text, in nats: engines that serve the same must agree."""

    base: list[float]
    adapter: list[float]


class StepMeasures(Measures):
    backend: Backend
    round: int
    step: int
    adapter_sha256: str = ""
    golden: str = PASSED
    """The verdict of golden check and canaries of this step; anything but `passed` is why it failed."""
    errors: tuple[str, ...] = ()
    """Of attempts at this step that failed, and of the last one if it did."""
    requests: tuple[RequestTiming, ...] = ()
    rollout_s: float = 0.0
    """From the first request to the last token."""
    lost_s: float = 0.0
    """Spent on attempts that failed, restarts included."""
    release_s: float = 0.0
    training_s: float = 0.0
    wake_s: float = 0.0
    reload_s: float = 0.0
    checks_s: float = 0.0
    """As in EngineStart."""
    wall_s: float = 0.0
    """From the step's beginning to its end."""
    kv_pool_tokens: int = 0
    """After the wake."""
    memory: dict[str, PhaseMemory] = {}
    trace: tuple[tuple[float, float, str], ...] = ()
    quality: Quality | None = None
    probe: Probe | None = None
    trained_sha256: str = ""
    """Of the adapter that this engine's own training gave; mode training."""

    @property
    def is_sound(self) -> bool:
        return self.golden == PASSED and self.rollout_s > 0

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)

    def figures(self) -> dict[str, float]:
        """By name, of a sound step; `metrics_of` says what they are."""
        found = {
            "rollout_s": self.rollout_s,
            "tokens_per_s": self.num_output_tokens / self.rollout_s,
            "goodput_tokens_per_s": self.num_output_tokens / (self.rollout_s + self.lost_s),
            "ttft_s": fmean(request.ttft_s for request in self.requests),
            "latency_p50_s": percentile([request.latency_s for request in self.requests], 0.5),
            "latency_p99_s": percentile([request.latency_s for request in self.requests], 0.99),
            "release_s": self.release_s,
            "wake_s": self.wake_s,
            "reload_s": self.reload_s,
            "transition_s": self.release_s + self.wake_s + self.reload_s,
            "training_s": self.training_s,
            "step_s": self.rollout_s + self.release_s + self.training_s + self.wake_s + self.reload_s,
            "kv_pool_tokens": float(self.kv_pool_tokens),
            "errors": float(len(self.errors)),
        }
        between = [gap for request in self.requests if (gap := request.inter_token_s) is not None]
        found |= {"inter_token_s": fmean(between)} if between else {}
        for phase, memory in self.memory.items():
            found |= {f"memory_{phase}_mean_gib": memory.mean_gib, f"memory_{phase}_peak_gib": memory.peak_gib}
        return found


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]
