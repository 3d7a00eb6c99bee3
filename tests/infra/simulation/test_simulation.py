"""The simulator's seconds, where they can be worked out by hand, and what must hold however parts fail."""

import pytest

from infra.simulation.clock import EventClock
from infra.simulation.forecast import simulate
from infra.simulation.replica import SimulatedReplica
from infra.simulation.requests import SimulatedRequest
from infra.simulation.run import PARTS, FailingPart, SimulatedRun
from infra.simulation.scenario import Recovery, Scenario

BASE = Scenario(
    gpus=1, num_steps=4, num_prompts=4, group_size=2, prompt_tokens=0, max_running_requests=8, request_tokens_per_s=10,
    replica_tokens_per_s=1e9, trainer_tokens_per_s=80, trainer_fixed_s=2, to_training_s=0.25, to_sampling_s=0.75,
    recovery=Recovery(engine_s=30, trainer_s=20, flow_s=7, worker_s=9),
)  # fmt: skip
"""Eight samples; with 100 tokens each they are sampled in 10 s and trained in 2 + 800 / 80 = 12 s."""
EQUAL = [100]


def step_s(scenario: Scenario, lengths: list[int] = EQUAL) -> float:
    return simulate(scenario, lengths).step_s


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 10 + 0.25 + 12 + 0.75),
        ({"max_running_requests": 4}, 2 * 10 + 0.25 + 12 + 0.75),
        ({"replica_tokens_per_s": 20}, 800 / 20 + 0.25 + 12 + 0.75),
        ({"request_s": 1.5}, 11.5 + 0.25 + 12 + 0.75),
        ({"prompt_tokens": 100}, 10 + 0.25 + 22 + 0.75),
        ({"gpus": 2, "replica_tokens_per_s": 20}, 400 / 20 + 0.25 + 2 + 5 + 0.75),
        ({"gpus": 2, "tensor_parallel": 2, "replica_tokens_per_s": 20}, 800 / 20 + 0.25 + 2 + 5 + 0.75),
        ({"gpus": 2, "trainer_gpus": 1}, 10 + 0.25 + 12 + 0.75),
    ],
)
def test_a_step_takes_the_seconds_that_its_tokens_and_rates_give(changes: dict[str, object], seconds: float) -> None:
    assert step_s(BASE.but(**changes)) == pytest.approx(seconds)


def test_a_longer_request_goes_on_faster_when_the_others_have_ended() -> None:
    scenario = BASE.but(num_prompts=1, replica_tokens_per_s=10)
    # 5 tokens a second each until the short one has its 50, then 10 a second for the 100 that are left of the long one
    assert step_s(scenario, [50, 150]) == pytest.approx(10 + 10 + 0.25 + 2 + 200 / 80 + 0.75)


def test_a_request_that_comes_later_takes_its_share_and_a_pause_holds_all() -> None:
    clock, ends = EventClock(), list[float]()
    replica = SimulatedReplica(clock, BASE.but(replica_tokens_per_s=5), lambda _: None, lambda *_: ends.append(clock.now_s))
    first, second = (SimulatedRequest(0, number, [100], (100,)) for number in range(2))
    replica.add([first])
    clock.after(10, lambda: replica.add([second]))
    clock.after(20, lambda: replica.set_paused(True))
    clock.after(23, lambda: replica.set_paused(False))
    clock.run()
    assert ends == pytest.approx([33, 43]), "50 tokens by 5 a second, 50 by 2.5; the second one then has 50 left"
    assert replica.counted_busy_s() == pytest.approx(40)


def test_samples_that_are_a_step_old_hide_the_shorter_half_of_a_step() -> None:
    apart = BASE.but(gpus=2, trainer_gpus=1)
    stale = simulate(apart.but(max_staleness=1), EQUAL)
    assert stale.mean_staleness == 1
    assert stale.step_s == pytest.approx(0.25 + 12 + 0.75), "the trainer is never without samples"
    assert simulate(apart, EQUAL).mean_staleness == 0


@pytest.mark.parametrize("num", [1, 2, 4])
def test_no_sample_is_older_than_allowed(num: int) -> None:
    run = SimulatedRun(BASE.but(gpus=2, trainer_gpus=1, max_staleness=num, num_steps=12), [10, 400, 30]).run()
    assert max(run.staleness) == num


def test_an_idle_replica_takes_over_half_of_what_waits_at_the_busiest() -> None:
    scenario = BASE.but(gpus=2, max_running_requests=1, trainer_tokens_per_s=1e9)
    lengths = [100, 100, 10, 10] * 2  # of the first, third, ... prompt, which all go to one replica
    alone = 4 * 10.0
    assert step_s(scenario, lengths) - 3 < 0.75 * alone


def test_busy_gpus_and_idle_gpus_make_up_the_whole_time() -> None:
    found = simulate(BASE.but(gpus=2, trainer_gpus=1), EQUAL)
    assert found.gpu_idle_share == pytest.approx(1 - (10 + 12) / (2 * 23))
    assert found.samples_per_s == pytest.approx(8 / 23) and found.tokens_per_s_per_gpu == pytest.approx(800 / 23 / 2)


def seconds_with(scenario: Scenario, part: FailingPart, at_s: float, num_steps: int = 2) -> float:
    """Seconds until the last of the first steps, with a part lost on the way."""
    run = SimulatedRun(scenario.but(num_steps=num_steps), EQUAL)
    run.clock.after(at_s, lambda: run.fail(part))
    run.run()
    assert sum(run.staleness.values()) == num_steps * 8, "each sample is trained once"
    return run.totals[-1].at_s


@pytest.mark.parametrize(
    ("part", "at_s", "gpus", "later"),
    [
        ("engine", 4, 1, 4 + 30),  # the only replica begins again
        ("engine", 15, 1, 30 - (22.25 + 0.75 - 15)),  # while training; it is started at once
        ("trainer", 15, 1, 15 - 10.25 + 20),
        ("trainer", 4, 1, 20 - 0.25),  # the training starts it
        ("flow", 4, 1, 4 + 7),
        ("worker", 15, 1, 15 - 10.25 + 9 + 0.25),
        ("engine", 4, 2, 4 + 30),  # the other one makes all, then the next step waits for the start
    ],
)
def test_a_lost_part_costs_its_recovery_and_the_work_that_is_repeated(
    part: FailingPart, at_s: float, gpus: int, later: float
) -> None:
    scenario = BASE.but(gpus=gpus, trainer_tokens_per_s=80 / gpus)
    calm = SimulatedRun(scenario.but(num_steps=2), EQUAL).run().totals[-1].at_s
    assert seconds_with(scenario, part, at_s) - calm == pytest.approx(later)


def test_a_flow_process_that_is_back_keeps_the_finished_samples() -> None:
    scenario = BASE.but(max_running_requests=4)  # two waves of 10 s
    calm = SimulatedRun(scenario.but(num_steps=2), EQUAL).run().totals[-1].at_s
    assert seconds_with(scenario, "flow", 15) - calm == pytest.approx(5 + 7), "the first wave is not repeated"


@pytest.mark.parametrize("changes", [{}, {"gpus": 4}, {"gpus": 4, "trainer_gpus": 2, "max_staleness": 2}, {"turns": 3}])
def test_each_sample_is_trained_once_however_many_parts_fail(changes: dict[str, object]) -> None:
    scenario = BASE.but(
        **changes, num_steps=40, failures_every=1, gpu_mtbf_hours=0.02, mean_tokens=50.0, tool_latency_s=1.0, num_prompts=9
    )
    run = SimulatedRun(scenario, nominal_step_s=20).run()
    assert sum(run.staleness.values()) == 40 * 18
    assert set(run.num_failures) == set(PARTS) and run.num_failures.total() > 40
    assert simulate(scenario).effective_ratio < 1


def test_turns_wait_for_their_tools() -> None:
    plain = BASE.but(turns=3, mean_tokens=100.0, log_spread=0)
    without = simulate(plain)
    found = simulate(plain.but(tool_latency_s=5.0))
    assert without.step_s == pytest.approx(30 + 0.25 + 2 + 2400 / 80 + 0.75)
    assert 2 * 5 < found.step_s - without.step_s < 8 * 5, "the slowest of eight samples"
    assert found == simulate(plain.but(tool_latency_s=5.0)), "a seed fixes all draws"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer_gpus": 8, "gpus": 8}, "of 8 GPUs it leaves none to the engine"),
        ({"gpus": 6, "tensor_parallel": 4}, "the engine's 6 GPUs are no multiple of it"),
        ({"max_staleness": 1}, "only with trainer_gpus above 0"),
        ({"gpus": 2000}, "less than or equal to 1024"),
        ({"to_training_s": float("inf")}, "finite number"),
        ({"replica_tokens_per_s": float("inf")}, "finite number"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BASE.but(**changes)
    with pytest.raises(
        ValueError, match=r"gpu_mtbf_hours is 0.0001: step 0 would not end, one of 1 GPUs fails every 0.36 s; give more"
    ):
        simulate(BASE.but(gpu_mtbf_hours=0.0001))
    with pytest.raises(ValueError, match="recorded samples have one turn"):
        simulate(BASE.but(turns=2), EQUAL)
