import pytest

from infra.config import TrainerConfig
from infra.megatron.program.optimizer import learning_rate


def rates(num_steps: int, **fields: object) -> list[float]:
    trainer = TrainerConfig.model_validate({"learning_rate": 1.0} | fields)
    return [learning_rate(trainer, step) for step in range(num_steps)]


def test_the_learning_rate_is_constant_unless_told_otherwise() -> None:
    assert rates(3, learning_rate=0.3) == [0.3] * 3


def test_a_warm_up_rises_in_a_straight_line_and_its_last_step_has_all() -> None:
    assert rates(6, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_a_cosine_goes_from_all_to_the_least_and_stays_there() -> None:
    half = (1 + 2**-0.5) / 2
    assert rates(7, lr_scheduler_type="cosine", num_schedule_steps=4) == pytest.approx([1, half, 0.5, 1 - half, 0, 0, 0])
    assert rates(6, lr_scheduler_type="cosine", num_schedule_steps=4, min_lr_ratio=0.2)[2:] == pytest.approx(
        [0.6, 0.2 + 0.8 * (1 - half), 0.2, 0.2]
    )


def test_a_cosine_begins_after_the_warm_up() -> None:
    found = rates(5, lr_scheduler_type="cosine", num_schedule_steps=4, lr_warmup_steps=2)
    assert found == pytest.approx([0.5, 1, 1, 0.5, 0])
