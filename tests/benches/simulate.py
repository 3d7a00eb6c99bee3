"""The simulator against what it simulates: rollouts by one, two and four replicas, and by four of which one is killed.

    .venv/bin/python tests/benches/simulate.py [--prompts 96] [--repeats 3] [--save OUT.json]

Real engine clients and servers over HTTP; the servers are the scripted ones of the tests, whose samples take as long as they have tokens
(sleeping_server.py). The simulator gets the recorded lengths, the servers' rate, and the seconds of a request that make its rollout by
one replica as long as the measured one. Rollouts by two and four replicas are then predicted.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from orchestration import random_model_in
from sleeping_server import S_PER_TOKEN

GROUP_SIZE, MAX_RUNNING = 8, 16
KILL_AT = 0.4
"""Share of a rollout's seconds after which a replica is killed."""


def over_sleeping_servers(folder: Path) -> None:
    """Have sleeping servers started in place of SGLang, in a workspace of their own."""
    from shared import write_interpreter

    server = Path(__file__).with_name("sleeping_server.py")
    program = write_interpreter(folder / "python-of-sglang", f"{sys.executable} {server}", {"scripted": "1"})
    os.environ |= {"RATCHET_WORKSPACE": str(folder), "RATCHET_SGLANG_PYTHON": str(program)}
    os.environ.setdefault("RATCHET_ENGINE_PORT", "6850")


class Rollouts:
    """Rollouts of the same prompts by engines of different numbers of replicas."""

    def __init__(self, folder: Path, num_prompts: int) -> None:
        from infra.config import SamplingConfig
        from infra.data.prompts import Prompt
        from infra.models import base_model
        from infra.records import AdapterVersion

        base = base_model.reference(str(random_model_in(folder / "random-tiny")))
        self.adapter = AdapterVersion(run="r", version=0, base=base, rank=4, alpha=8, target_modules=("q_proj",), seed=0)
        self.prompts = [Prompt(n, n, "?", "#### 4", [4, 5, 6 + n], seed=70 + n) for n in range(num_prompts)]
        self.sampling = SamplingConfig(group_size=GROUP_SIZE, max_output_tokens=1000)

    def seconds(self, num_replicas: int, repeats: int, kill_after_s: float = 0.0) -> tuple[list[float], list[int]]:
        """Return the seconds of each rollout and the samples' tokens."""
        from infra.config import EngineConfig
        from infra.engines import open_engine
        from infra.engines.interface import RolloutRequest

        config = EngineConfig(
            kind="sglang", replicas=num_replicas, max_context_tokens=1100, start_timeout_s=60, max_running_requests=MAX_RUNNING
        )
        engine, found, tokens = open_engine(config, self.adapter), [], [0]
        for _ in range(repeats):
            engine.wake()
            engine.load_adapter(self.adapter)
            killer = threading.Timer(kill_after_s, kill_replica)
            if kill_after_s:
                killer.start()
            begin = time.perf_counter()
            samples, how = engine.generate(RolloutRequest(self.prompts, self.sampling, self.adapter))
            found.append(time.perf_counter() - begin)
            assert how.num_lost_replicas == (1 if kill_after_s else 0)
            tokens = [len(sample.output_tokens) for sample in samples]
        engine.stop()
        return found, tokens


def kill_replica() -> None:
    """Kill the last replica."""
    from infra import engines

    os.kill(engines.recorded()[-1].process.pid, signal.SIGKILL)


def simulated_s(lengths: list[int], num_replicas: int, request_s: float, kill_after_s: float = 0.0) -> float:
    """Seconds of one simulated rollout. Training takes none."""
    from infra.simulation.run import SimulatedRun
    from infra.simulation.scenario import Scenario

    scenario = Scenario(
        gpus=num_replicas, num_steps=2, num_prompts=len(lengths) // GROUP_SIZE, group_size=GROUP_SIZE,
        max_running_requests=MAX_RUNNING, request_tokens_per_s=1 / S_PER_TOKEN, replica_tokens_per_s=1e9, request_s=request_s,
        trainer_tokens_per_s=1e15, trainer_fixed_s=0, to_training_s=0, to_sampling_s=0,
    )  # fmt: skip
    run = SimulatedRun(scenario, lengths)
    if kill_after_s:
        run.clock.after(kill_after_s, lambda: run.fail("engine"))
    return run.run().totals[0].at_s


def fitted_request_s(lengths: list[int], measured_s: float) -> float:
    """Find the seconds of a request with which one simulated replica takes as long as the real one."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if simulated_s(lengths, 1, middle) < measured_s else (low, middle)
    return low


def measure(folder: Path, num_prompts: int, repeats: int) -> dict[str, Any]:
    rollouts = Rollouts(folder, num_prompts)
    found, lengths = {}, [0]
    for num in (1, 2, 4):
        found[str(num)], lengths = rollouts.seconds(num, repeats)
    kill_after_s = KILL_AT * statistics.median(found["4"])
    found["4, one killed"], _ = rollouts.seconds(4, repeats, kill_after_s)
    request_s = fitted_request_s(lengths, statistics.median(found["1"]))
    rows = {}
    for name, seconds in found.items():
        expected = simulated_s(lengths, int(name[0]), request_s, kill_after_s if "killed" in name else 0.0)
        median = statistics.median(seconds)
        rows[name] = {"measured_s": seconds, "median_s": median, "simulated_s": expected, "off": expected / median - 1}
    speedup = rows["1"]["median_s"] / rows["4"]["median_s"]
    return {"samples": len(lengths), "tokens": sum(lengths), "request_s": request_s, "replica_speedup": speedup, "rollouts": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=96, help=f"prompts of {GROUP_SIZE} samples each")
    parser.add_argument("--repeats", type=int, default=3, help="rollouts of each kind")
    parser.add_argument("--save", type=Path, help="write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        over_sleeping_servers(Path(folder))
        found = measure(Path(folder), options.prompts, options.repeats)
    text = json.dumps(found, indent=1)
    print(text)
    if options.save:
        options.save.write_text(text + "\n")


if __name__ == "__main__":
    main()
