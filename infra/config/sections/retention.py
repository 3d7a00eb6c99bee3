"""The section `retention`: which adapter versions stay on the disk."""

from typing import Literal

from pydantic import Field

from infra.config.tools.base import ConfigBase


class RetentionConfig(ConfigBase):
    """Which adapter versions stay on the disk. The latest one always does, with its optimizer state: the next step needs both."""

    keep_last: int | None = Field(default=None, ge=1)
    """Number of latest versions that stay whole; None: all do, and nothing is ever removed."""
    keep_every: int = Field(default=0, ge=0)
    """Each version that is a multiple of this stays whole too; 0: none."""
    keep_best: bool = True
    """The version with the best evaluation stays whole too."""
    of_others: Literal["adapter", "nothing"] = "adapter"
    """What stays of all other versions. adapter: without optimizer state, it can be served but not trained on."""
