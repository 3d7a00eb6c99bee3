"""Chaos: strike a random part of a real run at a random moment, give the same command again where the run fails, compare all digests.

    .venv/bin/python tests/drills/chaos.py [--trials 10] [--seed 1] [--page docs/results/chaos.md] [--folder FOLDER] [--keep]

Everything is real and runs on a CPU: SGLang, Megatron under torchrun with two ranks, Prefect's server and a worker, MLflow's server. All
trials share one workspace, as a user's runs do, so a trial also meets what the one before it has left. A trial is a run of two steps,
started in a shell or by the worker, with a trainer of either life. Its seed decides how it is started, the part that is struck, the
signal and the moment. A part that does not live at that moment is struck as soon as it does.

A trial passes if the run ends by itself or by the same command again, with the digests of a run that was not disturbed, and if MLflow has
each of its steps once. A stopped process (SIGSTOP) is continued after the run's end; only a stopped flow is killed, since no command can
take over a run from a process that lives.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("scheduler", "engine", "flow", "rank", "torchrun", "worker", "mlflow", "prefect")
PAIRS = [(part, number) for part in PARTS for number in ("SIGKILL", "SIGTERM", "SIGSTOP")]
NUM_STEPS = 2
ATTEMPT_LIMIT_S = 420.0
"""A run of a minute that has not ended by then is taken for one that hangs."""
MAX_ATTEMPTS = 4
DELIVERY_LIMIT_S = 120.0
SMALL = {
    "data.num_prompts": 8,
    "num_steps": NUM_STEPS,
    "tracking.register_every": 1,
    "sampling.max_output_tokens": 40,
    "trainer.num_processes": 2,
    "evaluation.every": 0,
}


class Trial(NamedTuple):
    seed: int
    part: str
    signal: str
    by: str
    """`shell` (`ratchet run`) or `worker` (`prefect deployment run`)."""
    life: str
    """Of the trainer."""
    moment: float
    """Of the strike, as a part of the time that an undisturbed run takes."""

    @property
    def run(self) -> str:
        return f"chaos-{self.seed}"


class Outcome(NamedTuple):
    trial: Trial
    struck_after_s: float | None
    """None: the part never lived while the run did."""
    committed_before: int
    """Steps that were committed when the part was struck."""
    attempts: int
    seconds: float
    problems: list[str]


def trials(first_seed: int, count: int) -> list[Trial]:
    """One trial for each seed. In a random order all pairs of part and signal come once before any of them comes again."""
    made: list[Trial] = []
    pairs: list[tuple[str, str]] = []
    for seed in range(first_seed, first_seed + count):
        rng = random.Random(seed)
        pairs = pairs or rng.sample(PAIRS, len(PAIRS))
        part, number = pairs.pop()
        by = "worker" if part == "worker" else rng.choice(("shell", "worker"))
        life = "per_step" if part == "torchrun" else rng.choice(("per_step", "persistent"))
        made.append(Trial(seed, part, number, by, life, rng.uniform(0.02, 0.95)))
    return made


class Attempt:
    """The user's command, once."""

    def __init__(self, trial: Trial, folder: Path, number: int) -> None:
        from shared import RATCHET

        self.trial, self.log = trial, folder / f"{trial.run}-{number}.log"
        environment = dict(os.environ)
        fields = SMALL | {"trainer.mode": trial.life}
        if trial.by == "shell":
            options = [f"--{field}={value}" for field, value in fields.items()]
            command = [*RATCHET, "run", "--preset", "smoke", "--name", trial.run, *options]
        else:
            from flows.cli.services.servers import start_services
            from flows.presets import smoke
            from infra.config.tools.overrides import with_overrides
            from infra.services import prefect_password

            api_url, _ = start_services()  # a worker or a server that is gone is started again, as a user does
            environment |= prefect_password.client_environment(api_url)
            config = with_overrides(smoke(), [f"{field}={value}" for field, value in fields.items()], name=trial.run)
            parameters = json.dumps({"config": config.model_dump(mode="json")})
            command = [sys.executable, "-m", "prefect", "deployment", "run", "rl-run/local", "--params", parameters, "--watch"]
        self.begun = time.monotonic()
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def is_over(self) -> bool:
        """Whether the command has ended, and with it the flow run that it started."""
        return self.process.poll() is not None and self.flow() is None

    def flow(self) -> psutil.Process | None:
        """The process that runs the flow."""
        if self.trial.by == "shell":
            return psutil.Process(self.process.pid) if self.process.poll() is None else None
        return next((found for found in _living() if _is_flow_of_worker(found)), None)

    def kill(self) -> None:
        flow = self.flow()
        for process in (flow, psutil.Process(self.process.pid) if self.process.poll() is None else None):
            if process is not None:
                process.kill()
        self.process.wait()


def _living() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.NoSuchProcess:
            continue


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _is_flow_of_worker(process: psutil.Process) -> bool:
    command = " ".join(_words(process))
    if "prefect.flow_engine" not in command and "prefect.engine" not in command:
        return False
    try:
        return process.environ().get("RATCHET_WORKSPACE") == os.environ["RATCHET_WORKSPACE"]
    except psutil.Error:
        return False


def find(part: str, attempt: Attempt) -> psutil.Process | None:
    """The living process of a part of the run."""
    from infra.engines.server import server_process
    from infra.processes import children
    from infra.services import servers

    if part == "flow":
        return attempt.flow()
    if part in ("worker", "mlflow", "prefect"):
        service = servers.living(part)
        return children.find(service.process) if service else None
    if part in ("engine", "scheduler"):
        recorded = server_process.recorded()
        engine = children.find(recorded.process) if recorded else None
        if engine is None or part == "engine":
            return engine
        return next((child for child in engine.children(recursive=True) if "scheduler" in " ".join(_words(child))), None)
    of_trainer = [
        p
        for p in _living()
        if any(os.environ["RATCHET_WORKSPACE"] in word for word in _words(p)) and "infra.megatron" in _words(p)
    ]
    torchruns = [p for p in of_trainer if "torch.distributed.run" in _words(p)]
    if part == "torchrun":
        return torchruns[0] if torchruns else None
    ranks = [p for p in of_trainer if "torch.distributed.run" not in _words(p)]
    return random.Random(attempt.trial.seed).choice(ranks) if ranks else None


def num_committed(run: str) -> int:
    return len(list(Path(os.environ["RATCHET_WORKSPACE"]).glob(f"runs/{run}/steps/*/manifest.json")))


def digests(run: str) -> dict[str, str]:
    """Of the products of each step."""
    found = {}
    for path in sorted(Path(os.environ["RATCHET_WORKSPACE"]).glob(f"runs/{run}/steps/*/manifest.json")):
        manifest = json.loads(path.read_bytes())
        step = int(path.parent.name)
        found |= {
            f"step {step} prompts": manifest["prompts"]["file"]["sha256"],
            f"step {step} samples": manifest["rollouts"]["file"]["sha256"],
            f"step {step} adapter": manifest["adapter_out"]["weights"]["sha256"],
        }
    return found


def in_mlflow(run: str) -> tuple[int, int, int]:
    """Runs, rows of one metric, and versions of the model; each step gives one row and one version."""
    with sqlite3.connect(f"file:{os.environ['RATCHET_WORKSPACE']}/mlflow/mlflow.db?mode=ro", uri=True, timeout=30) as store:
        runs = store.execute("SELECT count(*) FROM runs WHERE name = ? AND lifecycle_stage = 'active'", (run,)).fetchone()[0]
        rows = "SELECT count(*) FROM metrics JOIN runs USING (run_uuid) WHERE name = ? AND key = 'reward/mean'"
        versions = "SELECT count(*) FROM model_versions WHERE name = ? AND current_stage != 'Deleted_Internal'"
        return runs, store.execute(rows, (run,)).fetchone()[0], store.execute(versions, (run,)).fetchone()[0]


def deliver() -> None:
    """What the run's own deliveries have not brought to MLflow yet."""
    from flows.cli.services.servers import start_services

    start_services()
    subprocess.run(
        [sys.executable, "-m", "infra.tracking.upload"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        timeout=DELIVERY_LIMIT_S,
        text=True,
    )


class Struck(NamedTuple):
    process: psutil.Process
    after_s: float
    committed: int


def run_trial(trial: Trial, folder: Path, undisturbed: dict[str, str], undisturbed_s: float) -> Outcome:
    begun, struck, problems, number = time.monotonic(), None, [], 0
    while not problems:
        number += 1
        attempt = Attempt(trial, folder, number)
        if struck is None:
            struck = strike(trial, attempt, trial.moment * undisturbed_s)
        if not ended(attempt):
            is_stopped_flow = (trial.part, trial.signal) == ("flow", "SIGSTOP") and number == 1
            if not is_stopped_flow:
                problems.append(f"attempt {number} has not ended after {ATTEMPT_LIMIT_S:.0f} s: {attempt.log}")
            attempt.kill()
        elif attempt.process.returncode == 0 and num_committed(trial.run) == NUM_STEPS:
            break
        if number == MAX_ATTEMPTS:
            problems.append(f"not ended after {number} attempts: {attempt.log}")
    if struck and trial.signal == "SIGSTOP" and struck.process.is_running():
        struck.process.send_signal(signal.SIGCONT)
    problems += checked(trial, undisturbed)
    return Outcome(
        trial, struck and round(struck.after_s, 1), struck.committed if struck else 0, number, time.monotonic() - begun, problems
    )


def strike(trial: Trial, attempt: Attempt, after_s: float) -> Struck | None:
    """Send the signal at the moment, or as soon as the part lives; None if the attempt ends before."""
    while not attempt.is_over():
        if attempt.seconds >= after_s and (process := find(trial.part, attempt)):
            process.send_signal(getattr(signal, trial.signal))
            return Struck(process, attempt.seconds, num_committed(trial.run))
        time.sleep(0.05)
    return None


def ended(attempt: Attempt) -> bool:
    """Whether the attempt ends in time. A stopped flow ends by no means: it is waited for no longer than shows that."""
    while not attempt.is_over():
        flow = attempt.flow()
        if flow is not None and _is_stopped(flow):
            time.sleep(5)
            return False
        if attempt.seconds > ATTEMPT_LIMIT_S:
            return False
        time.sleep(0.2)
    return True


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def checked(trial: Trial, undisturbed: dict[str, str]) -> list[str]:
    """What is wrong after a trial."""
    found = digests(trial.run)
    problems = [
        f"{name} is {found.get(name)}, undisturbed {digest}" for name, digest in undisturbed.items() if found.get(name) != digest
    ]
    wanted = (1, NUM_STEPS, NUM_STEPS)
    if in_mlflow(trial.run) != wanted:
        deliver()
    if (rows := in_mlflow(trial.run)) != wanted:
        problems.append(f"MLflow has {rows} runs, rows and versions, not {wanted}")
    return problems


def undisturbed_run(folder: Path, seed: int) -> tuple[dict[str, str], float]:
    """Digests and seconds of a run that is not struck."""
    attempt = Attempt(Trial(seed, "", "", "shell", "per_step", 0), folder, 1)
    if not ended(attempt) or attempt.process.returncode:
        raise SystemExit(f"a run that was not disturbed failed: {attempt.log}\n{attempt.log.read_text()[-3000:]}")
    return digests(attempt.trial.run), attempt.seconds


def open_workspace(folder: Path, port: int) -> None:
    """A workspace with its own ports and the tiny model of the checkout's workspace; settings of this process and its children."""
    workspace = folder / "workspace"
    from infra.models import base_model
    from infra.settings import settings

    tiny = base_model.locate("tiny")
    os.environ |= {
        "RATCHET_WORKSPACE": str(workspace),
        "RATCHET_PREFECT_PORT": str(port),
        "RATCHET_MLFLOW_PORT": str(port + 50),
        "RATCHET_ENGINE_PORT": str(port + 100),
        "HF_HUB_OFFLINE": "1",
    }
    settings.cache_clear()
    shutil.copytree(tiny, workspace / "models" / "tiny", dirs_exist_ok=True)


def left_behind() -> list[str]:
    """Processes of the workspace that live after `--stop`."""
    workspace = os.environ["RATCHET_WORKSPACE"]
    others = [
        process for process in _living() if process.pid != os.getpid() and any(workspace in word for word in _words(process))
    ]
    return [f"pid {process.pid}: {' '.join(_words(process))[:120]}" for process in others]


def make(chosen: list[Trial], folder: Path) -> tuple[list[Outcome], dict[str, str], list[str]]:
    """Outcomes of the trials, the digests they should have, and processes that are left at the end."""
    from flows.cli.services.servers import start_services, stop

    start_services()
    try:
        fresh, _ = undisturbed_run(folder, -1)
        warm, seconds = undisturbed_run(folder, -2)
        if fresh != warm:
            raise SystemExit(f"two runs that were not disturbed differ:\n{fresh}\n{warm}")
        print(f"undisturbed: {seconds:.0f} s on a warm engine; {len(fresh)} digests", flush=True)
        outcomes = []
        for trial in chosen:
            outcomes.append(run_trial(trial, folder, fresh, seconds))
            print(line_of(outcomes[-1]), flush=True)
    finally:
        stop()
    return outcomes, fresh, left_behind()


def line_of(outcome: Outcome) -> str:
    trial, result = outcome.trial, "; ".join(outcome.problems) or "equal"
    struck = "never" if outcome.struck_after_s is None else f"{outcome.struck_after_s:.1f} s"
    return (
        f"| {trial.seed} | {trial.by}, {trial.life} | {trial.part} | {trial.signal} | {struck} | {outcome.committed_before} | "
        f"{outcome.attempts} | {outcome.seconds:.0f} | {result} |"
    )


def page(outcomes: list[Outcome], wanted: dict[str, str], left: list[str], command: str) -> str:
    passed = sum(not outcome.problems for outcome in outcomes)
    rows = "\n".join(map(line_of, outcomes))
    products = "\n".join(f"| {name} | `{digest}` |" for name, digest in wanted.items())
    return f"""# Chaos: random parts of real runs, struck at random moments

{passed} of {len(outcomes)} trials passed; processes left at the end: {len(left)}. On {os.cpu_count()} CPU cores, without a GPU, with
real SGLang, Megatron under torchrun, Prefect's server and worker, and MLflow's server:

```
{command}
```

Each row is a run of {NUM_STEPS} steps. *Struck* counts from the start of the command, *committed* says how many steps were whole then,
*commands* how often the same command was given until the run had ended, *digests* compares prompts, samples and adapters of all steps
with a run that was not disturbed. A stopped flow process is killed before the command is given again; every other stopped part is
continued only after the run's end.

| seed | started by, trainer's life | part | signal | struck | committed | commands | seconds | digests |
|--|--|--|--|--|--|--|--|--|
{rows}

The digests of every trial that says `equal`:

| product | SHA-256 |
|--|--|
{products}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1, help="of the first trial; the next ones have the next numbers")
    parser.add_argument("--only", type=int, nargs="*", help="seeds of the trials to make, of those that --seed and --trials give")
    parser.add_argument("--port", type=int, default=23200, help="the first of 150")
    parser.add_argument("--folder", type=Path, help="for workspace and logs (default: a temporary one)")
    parser.add_argument("--page", type=Path, help="Markdown file for the outcomes")
    parser.add_argument("--keep", action="store_true", help="keep the folder of trials that all passed")
    options = parser.parse_args()
    sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="ratchet-chaos-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    open_workspace(folder, options.port)
    chosen = [trial for trial in trials(options.seed, options.trials) if not options.only or trial.seed in options.only]
    outcomes, wanted, left = make(chosen, folder)
    if options.page:
        command = f"python tests/drills/chaos.py --seed {options.seed} --trials {options.trials}"
        options.page.write_text(page(outcomes, wanted, left, command))
    failed = [outcome for outcome in outcomes if outcome.problems]
    print(
        f"{len(outcomes) - len(failed)} of {len(outcomes)} trials passed; left behind: {left or 'nothing'}; folder {folder}",
        flush=True,
    )
    if not (failed or left or options.keep or options.folder):
        shutil.rmtree(folder)
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
