"""What is simulated: GPUs, work, rates and failures. The defaults are those of the 7B shape on H200s (docs/results/speed.md)."""

from typing import Annotated, Self

from annotated_types import Ge, Gt, Le
from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, model_validator

MAX_GPUS = 1024
Duration = Annotated[float, Ge(0), AllowInfNan(False)]
Rate = Annotated[float, Gt(0), AllowInfNan(False)]


class Recovery(BaseModel):
    """Seconds from the loss of a part until it works again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine_s: Duration = Field(47.0, description="Start of an engine server with its checks.")
    trainer_s: Duration = Field(44.8, description="Start of the trainer program.")
    flow_s: Duration = Field(12.1, description="Start of the flow process, up to where it goes on.")
    worker_s: Duration = Field(9.5, description="Start of Prefect's worker and of the flow process.")


class Scenario(BaseModel):
    """A run to simulate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: Annotated[int, Ge(1), Le(MAX_GPUS)] = Field(8, description="GPUs in all, 1 to 1024.")
    trainer_gpus: Annotated[int, Ge(0)] = Field(
        0, description="GPUs of the trainer alone; 0: engine and trainer take turns on all GPUs."
    )
    tensor_parallel: Annotated[int, Ge(1)] = Field(1, description="GPUs of each replica of the engine.")
    max_staleness: Annotated[int, Ge(0), Le(64)] = Field(
        0, description="RL steps by which samples may be older than the trained adapter, 0 to 64. Above 0 it needs trainer_gpus."
    )
    num_steps: Annotated[int, Ge(2)] = Field(20, description="Steps that are measured; one more goes before.")
    num_prompts: Annotated[int, Ge(1)] = Field(64, description="Prompts of a step.")
    group_size: Annotated[int, Ge(1)] = Field(8, description="Samples of a prompt.")
    prompt_tokens: Annotated[int, Ge(0)] = Field(512, description="Tokens of a prompt.")
    mean_tokens: Rate = Field(512.0, description="Mean tokens of a turn, before max_tokens cuts it: lognormal.")
    log_spread: Annotated[float, Ge(0), Le(4)] = Field(0.6, description="Standard deviation of the tokens' logarithm, 0 to 4.")
    max_tokens: Annotated[int, Ge(1)] = Field(4096, description="Most tokens of a turn.")
    turns: Annotated[int, Ge(1)] = Field(1, description="Turns of a sample.")
    tool_latency_s: Duration = Field(0.0, description="Mean seconds of a tool between two turns: exponential.")
    max_running_requests: Annotated[int, Ge(1)] = Field(256, description="Requests that a replica runs at a time.")
    request_tokens_per_s: Rate = Field(100.0, description="Tokens per second of a request that has a replica to itself.")
    replica_tokens_per_s: Rate = Field(18800.0, description="Tokens per second of a full replica, all its GPUs together.")
    request_s: Duration = Field(0.0, description="Seconds of a request beside its tokens, such as its prompt's.")
    trainer_tokens_per_s: Rate = Field(
        31300.0, description="Samples' tokens, prompts included, per second and GPU of the trainer."
    )
    trainer_fixed_s: Duration = Field(0.5, description="Seconds of a training beside its tokens.")
    to_training_s: Duration = Field(0.4, description="Seconds from the last sampled token to the first training kernel.")
    to_sampling_s: Duration = Field(0.75, description="Seconds from the last training kernel to the first sampled token.")
    failures_every: Annotated[int, Ge(0)] = Field(
        0, description="Steps from one failure to the next, of engine, trainer, flow and worker in turn; 0: no failures."
    )
    gpu_mtbf_hours: Duration = Field(
        0.0, description="Mean hours of a GPU between two failures, of the program that uses it; 0: none."
    )
    seed: int = Field(0, description="Seed of all draws of lengths, tools and failures.")
    recovery: Recovery = Field(default_factory=Recovery, description="Seconds to recover.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.trainer_gpus >= self.gpus:
            raise ValueError(f"trainer_gpus is {self.trainer_gpus}: of {self.gpus} GPUs it leaves none to the engine")
        if self.engine_gpus % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}: the engine's {self.engine_gpus} GPUs are no multiple of it"
            )
        if self.max_staleness and not self.trainer_gpus:
            raise ValueError(
                f"max_staleness is {self.max_staleness}: engine and trainer work side by side only with trainer_gpus above 0"
            )
        return self

    @property
    def engine_gpus(self) -> int:
        return self.gpus - self.trainer_gpus

    @property
    def num_replicas(self) -> int:
        return self.engine_gpus // self.tensor_parallel

    @property
    def num_samples(self) -> int:
        """Of a step."""
        return self.num_prompts * self.group_size

    @property
    def has_failures(self) -> bool:
        return self.failures_every > 0 or self.gpu_mtbf_hours > 0

    def but(self, **changes: object) -> Self:
        return type(self).model_validate(dict(self) | changes)
