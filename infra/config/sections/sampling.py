"""The sections `sampling` and `environment`: how completions are sampled, and what episodes of several turns are played with."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from infra.config.sections.environments import taskset
from infra.config.sections.environments.mcp import McpServerSpec
from infra.config.sections.rewards.reward import VARIABLE
from infra.config.tools.base import ConfigBase


class SamplingConfig(ConfigBase):
    """How completions are sampled. Nucleus and top-k sampling are left out on purpose: they would sample from another
    distribution than the one whose log-probabilities the trainer can compute."""

    group_size: int = Field(default=8, ge=1)
    """Samples of one prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; 1: the model's own distribution, lower: likelier tokens."""
    max_output_tokens: int = Field(default=64, ge=1)
    """Longest answer; a longer one is cut off there."""
    ignore_eos: bool = False
    """Sample up to max_output_tokens even after an end-of-sequence token: for measuring an engine's speed, not for training."""

    @property
    def nucleus(self) -> float:
        """Probability mass of the likeliest tokens that are sampled from."""
        return 1.0

    @property
    def is_for_training(self) -> bool:
        """Whether the samples are trained on. Others carry no routes."""
        return True


MAX_EPISODE_WORKERS = 512
"""Episodes of one rollout that can be under way."""
HOW_EPISODES_RUN = {"workers", "memory_mib", "environment", "max_failed_frac"}
"""Fields of an environment that do not affect its episodes."""


class EnvironmentConfig(ConfigBase):
    """Episodes of several turns with an environment or an agent of yours. A field that has no effect with who plays is refused away from its default
    (docs/how-to/multi-turn.md#limits)."""

    kind: Literal["python", "program", "verifiers"] | None = None
    """What plays an episode: python (environment.name), program (environment.command) or verifiers (environment.id). None: by which is given."""
    name: str = ""
    """A class with reset and step, or an agent `async def run(task, client)`, in a file (`mine.py:Game`, from where the command runs). Its
    rewards take the place of the section reward's. Empty: none; a sample is one prompt and one answer."""
    command: tuple[str, ...] = ()
    """A program of any language that plays an episode as an agent, with its arguments, such as ["python3", "agent.py"]; in the place of a name.
    It gets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and the task as JSON on its standard input. Its last line is {"reward": 1.0}."""
    id: str = ""
    """A taskset of verifiers, in the place of a name: the name of one that is installed in verifiers' environment (.venv-verifiers), or the path
    of its package. Its tasks are the data source `verifiers:ID`."""
    repeats_tools: bool = True
    """Whether an episode of a taskset that begins again after a crash makes its tool calls again, in tool servers of its own. false: for tools with
    effects outside the episode; an episode that had called one has failed then, with the reason "outcome unknown"."""
    mcp: tuple[str, ...] = ()
    """MCP servers whose tools it may call, each a command such as "python3 server.py", or an address such as "https://host/mcp $MY_TOKEN" with the
    name of the variable that has its token. A program is started for each episode that calls it, and gets the variables that `environment` names."""
    max_turns: int = Field(default=4, ge=1, le=64)
    """Turns of an episode; a longer one ends here, with the rewards that it has. A turn counts when it begins. Range 1 to 64."""
    turn_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time of one call of reset or step, in seconds; an episode that takes longer has failed. No call gets more than episode_timeout_s. Of a
    taskset: of one call of a tool, whose result is an error then. Not for agents and programs."""
    episode_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time of an episode, the model's answers included, in seconds; it ends with the rewards that it has when the turn under way is done.
    An agent has failed then."""
    max_observation_tokens: int = Field(default=512, ge=2)
    """Tokens of an observation after the first; from the middle of a longer one the rest is left out. Of a taskset: of a tool's result. Not for
    agents and programs, whose messages are their own."""
    tool_timeout_s: float = Field(default=20.0, gt=0)
    """Longest time of a tool's call, in seconds; the result of a longer one is an error. A call in step also ends with turn_timeout_s, and
    the episode has failed then. For environments and agents in Python."""
    max_result_characters: int = Field(default=16384, ge=2, le=1048576)
    """Length of a tool's result, in characters. The middle of a longer text is left out; any other longer result is an error. For
    environments and agents in Python. Range 2 to 1048576."""
    keep_reasoning: bool = True
    """Whether what the model reasoned in earlier turns stays in the context, token for token. false: each turn's context is what the chat template
    makes of the messages, and each turn is a trajectory of its own; for templates that drop earlier reasoning, such as Qwen3's."""
    workers: int | None = Field(default=None, ge=1, le=MAX_EPISODE_WORKERS)
    """Processes, each with one episode at a time, which is the number of episodes under way. None: one for each episode, as far as a quarter of
    the machine's memory holds them at 64 MiB each, 512 at most."""
    memory_mib: int = Field(default=4096, ge=128)
    """Memory that a worker may use, in MiB."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that it needs; it gets no others but PATH, HOME, locale, PYTHONPATH and the like."""

    @field_validator("environment")
    @classmethod
    def _are_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if any(not VARIABLE.fullmatch(name) for name in names):
            raise ValueError(
                "environment.environment holds something that is no variable's name: give names alone, such as MY_KEY, never values"
            )
        return names

    @model_validator(mode="after")
    def _mcp_are_servers(self) -> Self:
        for text in self.mcp:  # no rule of the field, whose errors show the value
            McpServerSpec.parse(text)
            if self.mcp.count(text) > 1:
                raise ValueError(f"environment.mcp names {text!r} twice")
        return self

    @property
    def mcp_servers(self) -> list[McpServerSpec]:
        return [McpServerSpec.parse(text) for text in self.mcp]

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that its workers get: `environment`, and those of the tokens of MCP servers."""
        return tuple(
            dict.fromkeys((*self.environment, *(each.token_variable for each in self.mcp_servers if each.token_variable)))
        )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given: dict[str, object] = {"name": self.name, "command": list(self.command), "id": self.id}
        chosen = [f"environment.{field} {value!r}" for field, value in given.items() if value]
        if len(chosen) > 1:
            raise ValueError(f"{' with '.join(chosen)}: leave one of them out")
        wanted = {"python": "name", "program": "command", "verifiers": "id"}.get(self.kind or "")
        if wanted and not given[wanted]:
            raise ValueError(f"environment.kind {self.kind!r} needs environment.{wanted}{f', not {chosen[0]}' if chosen else ''}")
        if self.id:
            taskset.check_name(self.id)
        if self.mcp and not self.name:
            other = (
                f"environment.command {list(self.command)}: a program reaches servers by itself"
                if self.command
                else f"environment.id {self.id!r}: a taskset has its own tools"
                if self.id
                else "no environment.name"
            )
            raise ValueError(f"environment.mcp {list(self.mcp)} with {other}; leave mcp out, or name an environment in Python")
        return self

    @property
    def label(self) -> str:
        """What it is called; empty: there is none."""
        return self.name or self.id or " ".join(self.command)


class PlayedEnvironment(EnvironmentConfig):
    """The environment of a rollout with all that decides about its episodes."""

    max_failed_frac: float = Field(ge=0, le=1)
    """Largest share of a step's episodes that may fail: reward.max_unjudged_frac. Range 0 to 1."""
