"""The measurements of an engine, at its start and in each step. Plain JSON, one file each, written when complete."""

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
    """Origin of a block's figures, besides model and options."""

    machine: str
    """Kind of machine: `1 x NVIDIA H200`."""
    unit: str
    """Which machine: UUIDs of its GPUs, or the host's name if it has none."""
    code: str
    """Digest of the measuring code."""
    locks: str
    """Digest of all lock files."""

    def differences(self, there: "Provenance") -> list[str]:
        """Describe all differences that make the other's figures not comparable with ours. The unit is not one of them."""
        pairs = ((name, getattr(there, name), getattr(self, name)) for name in ("machine", "code", "locks"))
        return [f"{name} {theirs} (here: {ours})" for name, theirs, ours in pairs if theirs != ours]


class EngineStart(Measures):
    """The start of one engine in one round."""

    backend: Backend
    round: int
    start_s: float
    """Seconds from the command to the first answer, without checks."""
    version: str
    """Version as reported by the server."""
    flags: tuple[str, ...]
    colocation: str
    reason: str
    log_path: str
    memory_before_gib: float
    """Memory in use when the engine was started. It shows leftovers of earlier engines."""
    kv_pool_tokens: int
    wait_s: float = 0.0
    """Seconds before the command until the memory was free."""
    load_s: float = 0.0
    """Seconds for loading the first adapter."""
    warm_up_s: float = 0.0
    checks_s: float = 0.0
    """Seconds of golden checks and canaries. No other figure includes them."""
    origin: Provenance | None = None
    """None in figures that are older than this field."""
    num_starts: int = 1
    """Above 1 if the comparison was interrupted, or an engine had to be replaced."""

    @property
    def is_twin(self) -> bool:
        return "twin" in self.version


class Quality(Measures):
    """Quality of answers with free length."""

    num_samples: int
    mean_output_tokens: float
    mean_reward: float
    truncated_frac: float


class Probe(Measures):
    """Log-probs of a fixed text, in nats. Engines that serve the same adapter must agree."""

    base: list[float]
    adapter: list[float]


class StepMeasures(Measures):
    backend: Backend
    round: int
    step: int
    adapter_sha256: str = ""
    golden: str = PASSED
    """Result of this step's golden check and canaries: `passed`, or why they failed."""
    errors: tuple[str, ...] = ()
    """Errors of failed attempts at this step, including the last attempt."""
    requests: tuple[RequestTiming, ...] = ()
    rollout_s: float = 0.0
    """Seconds from the first request to the last token."""
    lost_s: float = 0.0
    """Seconds spent on failed attempts, including restarts."""
    release_s: float = 0.0
    training_s: float = 0.0
    wake_s: float = 0.0
    reload_s: float = 0.0
    checks_s: float = 0.0
    """Seconds of checks, as in EngineStart."""
    wall_s: float = 0.0
    """Seconds from the start of the step to its end."""
    kv_pool_tokens: int = 0
    """Tokens in the KV cache after the wake."""
    memory: dict[str, PhaseMemory] = {}
    trace: tuple[tuple[float, float, str], ...] = ()
    quality: Quality | None = None
    probe: Probe | None = None
    trained_sha256: str = ""
    """Digest of the adapter that the training in this engine's own step made; only in mode training."""

    @property
    def is_sound(self) -> bool:
        return self.golden == PASSED and self.rollout_s > 0

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)

    def figures(self) -> dict[str, float]:
        """Figures of a sound step, by name. See `metrics_of` for their meaning."""
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
    """The smallest value that is not exceeded by this share of the values."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]
