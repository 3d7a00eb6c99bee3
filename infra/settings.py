"""What this machine is: places, ports, interpreters, GPUs. Read from the environment (`RATCHET_...`), never a flow parameter."""

import sys
from functools import cache
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

CHECKOUT = Path(__file__).resolve().parent.parent
DEFAULT_WORKSPACE = CHECKOUT / ".ratchet"


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="RATCHET_", extra="forbid", frozen=True)

    workspace: Path = DEFAULT_WORKSPACE
    """Where runs, models, logs and the stores of this machine lie."""
    sglang_python: Path = CHECKOUT / ".venv-sglang/bin/python"
    """Interpreter of SGLang's own environment; `./infra/quickstart` makes it."""
    sglang_pythonpath: str = ""
    """PYTHONPATH of that interpreter, for a machine where SGLang lies outside an environment."""
    mlflow_uri: str | None = None
    """Tracking server or store; None: the server that quickstart started, else the workspace's own sqlite store."""
    mlflow_port: int = 5000
    prefect_port: int = 4200
    engine_port: int = 30000
    """First choice; a free one is taken where it is occupied."""
    num_cpu_threads: int = Field(default=0, ge=0)
    """For the trainer's processes together; 0: all cores of this machine."""
    min_free_gib: float = Field(default=1.0, ge=0)
    """A step does not start with less room than this in the workspace."""

    @property
    def results(self) -> Path:
        """Prefect's cached task results; in the workspace, because they name files of it."""
        return self.workspace / "results"


@cache
def settings() -> Settings:
    """The settings of this process, read once: a process works in one workspace."""
    loaded = Settings()
    return loaded.model_copy(update={"workspace": loaded.workspace.expanduser().absolute()})


def main_python() -> Path:
    """The interpreter of this environment, for child programs."""
    return Path(sys.executable)
