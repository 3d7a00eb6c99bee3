"""A simulated run: steps that sample, train and load, with failures in between.

Step k samples as soon as adapter k - max_staleness is served, and trains when all its samples are there and the trainer is free. With the
trainer on GPUs of its own, sampling goes on while it trains; else engine and trainer take turns. A step's samples are used in its own
training, so none is lost or used twice.

A lost replica starts again where the next rollout begins, which waits for it; the only one starts at once. A lost trainer begins its
training again. A lost flow process ends the training and the unfinished samples; finished ones are in the journal.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from infra.simulation.clock import Event, EventClock
from infra.simulation.fleet import Fleet
from infra.simulation.requests import Lengths, SimulatedRequest
from infra.simulation.scenario import Scenario

FailingPart = Literal["engine", "trainer", "flow", "worker"]
PARTS: tuple[FailingPart, ...] = ("engine", "trainer", "flow", "worker")
HOUR_S = 3600.0
MOST_FAILURES = 1000
"""Of GPUs in one step: more, and the step is taken for one that never ends."""


class CountedSoFar(NamedTuple):
    """What was counted up to a moment."""

    at_s: float
    engine_busy_s: float
    """Seconds of replicas, summed."""
    trainer_busy_s: float
    num_tokens: int


class SimulatedRun:
    def __init__(self, scenario: Scenario, recorded: Sequence[int] = (), nominal_step_s: float = 0.0) -> None:
        """recorded: Tokens of recorded samples, see Lengths.
        nominal_step_s: Seconds of an undisturbed step; a failure of `failures_every` strikes at a random moment of that long."""
        self.scenario, self.clock = scenario, EventClock()
        self.fleet = Fleet(self.clock, scenario, lambda: self.version, self._finished)
        self.totals: list[CountedSoFar] = []
        """At the end of each training."""
        self.staleness: Counter[int] = Counter()
        """Trained samples by RL steps that their adapters were older."""
        self.num_failures: Counter[FailingPart] = Counter()
        self.version = 0
        """Of the served adapter; also the step that trains next."""
        self._nominal_step_s = nominal_step_s
        self._lengths, self._rng = Lengths(scenario, recorded), random.Random(scenario.seed + 2)
        self._num_asked = 0
        """Steps whose samples were asked for."""
        self._left: Counter[int] = Counter()
        self._tokens: Counter[int] = Counter()
        self._sampled_by: dict[int, list[int]] = {}
        self._training: Event | None = None
        self._trainer_busy_s, self._trainer_since = 0.0, 0.0
        self._is_flow_up, self._is_trainer_up = True, True
        self._lost: list[Callable[[], None]] = []
        """Restarts of lost replicas, which the next rollout makes."""
        self._failed_at: list[int] = []
        """Steps that had ended at each failure of a GPU."""
        self._held: list[SimulatedRequest] = []
        """Samples to begin again when the flow process is back."""

    def run(self) -> "SimulatedRun":
        if self.scenario.gpu_mtbf_hours:
            self.clock.after(self._until_next_failure_s(), self._hardware_fails)
        self._begin_step()
        self.clock.run()
        return self

    def _begin_step(self) -> None:
        """Ask for all samples that the served adapter may make."""
        if self.scenario.failures_every and self.version % self.scenario.failures_every == self.scenario.failures_every // 2:
            part = PARTS[self.version // self.scenario.failures_every % len(PARTS)]
            self.clock.after(self._rng.random() * self._nominal_step_s, lambda: self.fail(part))
        self._after_restarts(self._ask)

    def _after_restarts(self, do: Callable[[], None]) -> None:
        """Do something once all lost replicas are started again."""
        restarts, self._lost = self._lost, []

        def go_on() -> None:
            for restart in restarts:
                restart()
            do()

        if restarts:
            self.clock.after(self.scenario.recovery.engine_s, go_on)
        else:
            go_on()

    def _ask(self) -> None:
        requests: list[SimulatedRequest] = []
        while self._num_asked <= self.version + self.scenario.max_staleness:
            step = self._num_asked
            found = self._lengths.requests_of(step)
            self._left[step], self._sampled_by[step] = len(found), []
            self._tokens[step] = sum(sum(request.whole) + self.scenario.prompt_tokens for request in found)
            requests += found
            self._num_asked += 1
        self._sample(requests)
        self._train_if_ready()

    def _sample(self, requests: list[SimulatedRequest]) -> None:
        if self._is_flow_up and self.fleet.living:
            self.fleet.add(requests)
        else:
            self._held += requests

    def _finished(self, request: SimulatedRequest) -> None:
        self._left[request.step] -= 1
        self._sampled_by[request.step].append(request.sampled_by)
        self._train_if_ready()

    def _train_if_ready(self) -> None:
        step = self.version
        if step < self._num_asked and not self._left[step] and self._is_flow_up and self._training is None:
            self._begin_training()

    def _begin_training(self) -> None:
        scenario, step = self.scenario, self.version
        wait_s = scenario.to_training_s if self._is_trainer_up else scenario.recovery.trainer_s
        self._is_trainer_up = True
        gpus = scenario.trainer_gpus or scenario.gpus
        seconds = scenario.trainer_fixed_s + self._tokens[step] / (scenario.trainer_tokens_per_s * gpus)
        self._trainer_since = self.clock.now_s + wait_s
        self._training = self.clock.after(wait_s + seconds, self._end_training)

    def _end_training(self) -> None:
        self._training = None
        self._trainer_busy_s += self.clock.now_s - self._trainer_since
        self.totals.append(CountedSoFar(self.clock.now_s, self.fleet.busy_s(), self._trainer_busy_s, self.fleet.num_tokens))
        if len(self.totals) > 1:  # the first step is not measured
            self.staleness.update(self.version - version for version in self._sampled_by[self.version])
        if len(self.totals) > self.scenario.num_steps:
            self.clock.stop()
            return
        self.fleet.set_paused(True)
        self.clock.after(self.scenario.to_sampling_s, self._load)

    def _load(self) -> None:
        self.version += 1
        self.fleet.set_paused(False)
        self._begin_step()

    def _until_next_failure_s(self) -> float:
        return self._rng.expovariate(self.scenario.gpus / (self.scenario.gpu_mtbf_hours * HOUR_S))

    def _hardware_fails(self) -> None:
        self._failed_at.append(len(self.totals))
        if self._failed_at[-MOST_FAILURES:] == [len(self.totals)] * MOST_FAILURES:
            raise ValueError(
                f"gpu_mtbf_hours is {self.scenario.gpu_mtbf_hours:g}: step {len(self.totals)} would not end, one of {self.scenario.gpus} GPUs fails "
                f"every {self.scenario.gpu_mtbf_hours * HOUR_S / self.scenario.gpus:.3g} s; give more, or shorter steps"
            )
        is_engine = self._rng.random() * self.scenario.gpus < self.scenario.engine_gpus
        if not self.scenario.trainer_gpus:  # the program that uses the GPUs at the moment
            is_engine = self._training is None
        self.fail("engine" if is_engine else "trainer")
        self.clock.after(self._until_next_failure_s(), self._hardware_fails)

    def fail(self, part: FailingPart) -> None:
        """Lose a part now."""
        self.num_failures[part] += 1
        match part:
            case "engine":
                self._lose_replica()
            case "trainer":
                self._stop_training()
                self._is_trainer_up = False  # the next training starts it
                self._train_if_ready()
            case "flow":
                self._lose_flow(self.scenario.recovery.flow_s)
            case "worker":
                self._lose_flow(self.scenario.recovery.worker_s)

    def _lose_replica(self) -> None:
        if not self.fleet.living:
            return
        lost = self.fleet.lose_one()
        self._lost.append(lambda: self.fleet.restart(lost))
        if not self.fleet.living:
            self._after_restarts(self._sample_what_is_held)

    def _lose_flow(self, recovery_s: float) -> None:
        if self._is_flow_up:
            self._is_flow_up = False
            self._stop_training()
            self._held += self.fleet.take_back()
            self.clock.after(recovery_s, lambda: self._after_restarts(self._flow_is_back))

    def _flow_is_back(self) -> None:
        self._is_flow_up = True
        self._sample_what_is_held()
        self._train_if_ready()

    def _sample_what_is_held(self) -> None:
        held, self._held = self._held, []
        self._sample(held)

    def _stop_training(self) -> None:
        if self._training is not None:
            self._training.cancel()
            self._training = None
            self._trainer_busy_s += max(0.0, self.clock.now_s - self._trainer_since)
