from pathlib import Path

import pytest
from safetensors import safe_open

from infra.comparison.config import ComparisonConfig
from infra.comparison.measurement import load
from infra.megatron.protocol.job import ADAPTER_WEIGHTS
from infra.megatron.protocol.optimizer_files import MOMENTS
from infra.models import base_model
from infra.store.files import verified
from infra.store.layout import adapter_folder


@pytest.mark.parametrize("is_trainable", [True, False])
def test_an_adapter_of_a_comparison_has_an_optimizer_state_where_it_is_trained_on(
    is_trainable: bool, workspace: Path, model_folder: Path
) -> None:
    config, base, folder = (
        ComparisonConfig(model=str(model_folder)),
        base_model.reference(str(model_folder)),
        adapter_folder("c", 1),
    )
    load.make_adapter(folder, base, config.trainer.lora, 0, is_trainable=is_trainable)
    made = load.adapter_in(folder, config, base, "c", 1)
    assert made.weights and made.num_optimizer_steps == 0
    assert {*made.moments} == ({*MOMENTS} if is_trainable else set())
    with safe_open(verified(made.weights), "numpy") as weights:
        for moment in made.moments.values():
            with safe_open(verified(moment), "numpy") as state:
                assert sorted(state.keys()) == sorted(weights.keys())
                assert not any(state.get_tensor(name).any() for name in weights.keys())  # noqa: SIM118
    (folder / ADAPTER_WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=ADAPTER_WEIGHTS):
        load.adapter_in(folder, config, base, "c", 1)
