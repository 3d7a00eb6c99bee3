"""The section `tracking`: what MLflow shows of a run."""

from pydantic import Field, field_validator

from infra.config.tools.base import ConfigBase
from infra.config.tools.names import NameInForm, checked_name


class TrackingConfig(ConfigBase):
    """What MLflow shows of the run."""

    experiment: NameInForm = "ratchet"
    """MLflow experiment; also names a folder of artifacts, so it is written as the name of a run."""
    sweep: str = ""
    """Name that the runs of a sweep share; a tag in MLflow. Empty: the run belongs to none."""
    num_samples_shown: int = Field(default=8, ge=0)
    """Samples of a step on its page, and in the table `samples.json` of the MLflow run."""
    register_every: int = Field(default=10, ge=0)
    """Steps from one adapter that is registered as a version of the model in MLflow to the next; the best and the last one are always
    registered. 0: only these two."""

    @field_validator("experiment")
    @classmethod
    def _experiment_is_a_folder_name(cls, name: str) -> str:
        return checked_name(name, "experiment")
