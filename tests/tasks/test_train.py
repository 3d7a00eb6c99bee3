from pathlib import Path

import numpy as np
import safetensors.numpy

from infra.files import adapter_folder
from infra.megatron.job import ADAPTER_WEIGHTS, CANARY, OPTIMIZER
from infra.records import AdapterVersion, BaseModelRef
from tasks.train import next_version


def test_the_next_version_counts_rl_steps_and_the_optimizer_s_steps_apart(workspace: Path) -> None:
    adapter = AdapterVersion(
        run="run",
        version=2,
        num_optimizer_steps=8,
        base=BaseModelRef(id="tiny", sha256="ab"),
        rank=4,
        alpha=8,
        target_modules=("q_proj",),
        seed=0,
    )
    folder = adapter_folder("run", 3)
    (folder / "state").mkdir(parents=True)
    for name in (ADAPTER_WEIGHTS, CANARY):
        (folder / name).write_bytes(b"content")
    (folder / OPTIMIZER).write_bytes(safetensors.numpy.save({"x": np.zeros(1)}, {"num_optimizer_steps": "12"}))
    made = next_version(adapter)
    assert (made.version, made.num_optimizer_steps) == (3, 12)
