"""The section `export`: what a run leaves behind when it ends."""

from typing import Literal

from infra.config.tools.base import ConfigBase


class ExportConfig(ConfigBase):
    """What a run leaves in its folder `export` when it ends."""

    what: Literal["nothing", "adapter", "merged"] = "adapter"
    """adapter: a PEFT folder; merged: besides, a Hugging Face folder of the base model with the adapter in its weights."""
    which: Literal["best", "latest"] = "best"
    """best: by pass@1; without evaluations the latest."""
