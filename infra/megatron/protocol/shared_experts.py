"""Where the engine's experts are, for a trainer that computes with them: the file that the engine's process writes when it has loaded its
model (infra/engines/launchers/sglang_shared_experts.py). No torch here.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.processes import children
from infra.processes.children import ProcessRef
from infra.store.files import read_note

FILE = "experts.json"


class Stack(BaseModel):
    """The memory of one parameter: all experts of a layer, [E, 2 F, H] or [E, H, F], contiguous."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    shape: tuple[int, int, int]
    handle: str = ""
    """CUDA's handle of the allocation, in hexadecimal digits."""
    offset: int = 0
    """Bytes from the allocation's begin."""
    file: str = ""
    """On a CPU: name of the file with the values, in the same folder."""


class SharedExperts(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    process: ProcessRef
    """The process whose memory it is."""
    stacks: dict[str, Stack]
    """By SGLang's name."""

    def is_held(self) -> bool:
        """Whether that process lives: the memory is undefined when it has ended."""
        return children.find(self.process) is not None


def of_living_engine(path: Path) -> SharedExperts | None:
    """Return the content of the file; None if there is none, or the engine that wrote it has ended."""
    found = read_note(path, SharedExperts)
    return found if found and found.is_held() else None
