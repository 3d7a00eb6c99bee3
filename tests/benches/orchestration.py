"""What a step costs beside engine and trainer: seconds, calls of Prefect's API, rows and bytes in its database; for few and many samples.

    .venv/bin/python tests/benches/orchestration.py [--samples 64 4096] [--steps 3] [--page docs/results/orchestration.md]

Prefect's own server with its SQLite, the real trainer, a model with random weights; the engine is the scripted one, whose samples cost
next to nothing: what is measured lies beside it. A first step of each run, which starts the trainer and waits for MLflow, is not counted.
"""

import argparse
import collections
import contextlib
import json
import os
import platform
import re
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

GROUP_SIZE = 8
SETTLED_S = 6.0
"""Prefect's server writes events some seconds after it heard of them: rows are counted once nothing has come for so long."""
DEADLINE_S = 120.0
ENGINE_AND_TRAINER = ("wake", "roll_out", "release", "train", "reload")
OF_SAMPLES = ("draw", "score", "assemble")
BY_TIME = ("POST /logs/", "GET /csrf-token")
"""Log lines go in batches, every two seconds at the most."""
Calls = collections.Counter[str]


@contextmanager
def counted_calls(api_url: str) -> Iterator[Calls]:
    """Requests to Prefect's API from this process, by method and path; ids in paths are left out."""
    calls: Calls = collections.Counter()
    send, send_async = httpx.Client.send, httpx.AsyncClient.send

    def note(request: httpx.Request) -> None:
        if str(request.url).startswith(api_url):
            path = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "ID", str(request.url).removeprefix(api_url).partition("?")[0])
            calls[f"{request.method} {path}"] += 1

    def noting(self: httpx.Client, request: httpx.Request, **how: Any) -> httpx.Response:
        note(request)
        return send(self, request, **how)

    async def noting_async(self: httpx.AsyncClient, request: httpx.Request, **how: Any) -> httpx.Response:
        note(request)
        return await send_async(self, request, **how)

    httpx.Client.send, httpx.AsyncClient.send = noting, noting_async  # type: ignore[method-assign,assignment]
    try:
        yield calls
    finally:
        httpx.Client.send, httpx.AsyncClient.send = send, send_async  # type: ignore[method-assign]


def rows_of(database: Path) -> dict[str, int]:
    """Rows of each table."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=60) as connection:
        names = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]
        return {name: connection.execute(f'select count(*) from "{name}"').fetchone()[0] for name in names}


def used_mb(database: Path) -> float:
    """Megabytes (10^6 bytes) of the database's pages that hold something, indexes included."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=60) as connection:
        pages, unused, size = (
            connection.execute(f"pragma {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
    return float((pages - unused) * size / 1e6)


def settled_rows(database: Path) -> dict[str, int]:
    before, since, deadline = rows_of(database), time.monotonic(), time.monotonic() + DEADLINE_S
    while time.monotonic() - since < SETTLED_S and time.monotonic() < deadline:
        time.sleep(0.5)
        if (now := rows_of(database)) != before:
            before, since = now, time.monotonic()
    return before


def measured_step(config: Any, database: Path, api_url: str) -> dict[str, Any]:
    """One step; seconds by kind, calls by path, new rows by table, megabytes that the database grew by."""
    from flows.step import rl_step
    from infra.telemetry.timings import SECONDS, measures_of

    before, mb_before = settled_rows(database), used_mb(database)
    begin = time.perf_counter()
    with counted_calls(api_url) as calls:
        made = rl_step(config)
    wall_s = time.perf_counter() - begin
    after = settled_rows(database)
    spent = {verb: figures[SECONDS] for verb, figures in measures_of(made.run, made.step).items()}
    inside, of_samples = (sum(spent.get(verb, 0.0) for verb in verbs) for verbs in (ENGINE_AND_TRAINER, OF_SAMPLES))
    return {
        "seconds": {
            "whole": wall_s,
            "engine and trainer": inside,
            "draw, score, assemble": of_samples,
            "all else": wall_s - inside - of_samples,
        },
        "calls": dict(sorted(calls.items())),
        "rows": {name: count - before.get(name, 0) for name, count in sorted(after.items()) if count != before.get(name, 0)},
        "database_mb": used_mb(database) - mb_before,
    }


def config_of(num_samples: int, model: Path) -> Any:
    from flows.presets import smoke

    base = smoke()
    return base.but(
        name=f"samples-{num_samples}",
        model=str(model),
        data=base.data.but(num_prompts=num_samples // GROUP_SIZE),
        engine=base.engine.but(kind="scripted"),
        sampling=base.sampling.but(group_size=GROUP_SIZE),
        trainer=base.trainer.but(mode="persistent", max_mismatch=None),  # the scripted engine makes its log-probabilities up
    )


def measure(counts: list[int], num_steps: int, workspace: Path) -> dict[str, list[dict[str, Any]]]:
    """Steps by number of samples; the server that it starts, if none is there, stays."""
    from prefect.settings import temporary_settings

    from flows.cli.session import client_settings
    from flows.step import rl_step
    from infra.services import servers

    api_url, model = servers.ensure_prefect(), random_model_in(workspace / "random-tiny")
    found: dict[str, list[dict[str, Any]]] = {}
    with temporary_settings(client_settings(api_url)):
        for count in counts:
            config = config_of(count, model)
            rl_step(config)
            found[str(count)] = [measured_step(config, workspace / "prefect/prefect.db", api_url) for _ in range(num_steps)]
    return found


def random_model_in(folder: Path) -> Path:
    from infra.tiny_model.architecture import random_model
    from infra.tiny_model.tokenizer import train_tokenizer

    if not (folder / "model.safetensors").exists():
        tokenizer = train_tokenizer()
        tokenizer.save_pretrained(folder)
        random_model("tiny", tokenizer, 0).save_pretrained(folder)
    return folder


def by_samples(calls: dict[str, int]) -> int:
    """Calls that could hang on the number of samples."""
    return sum(count for path, count in calls.items() if path not in BY_TIME)


def page_of(found: dict[str, list[dict[str, Any]]], command: str) -> str:
    counts = list(found)

    def row(name: str, values: list[str]) -> str:
        return f"| {name} | {' | '.join(values)} |"

    def of_steps(pick: Any) -> list[str]:
        return [", ".join(str(pick(step)) for step in found[count]) for count in counts]

    kinds = found[counts[0]][0]["seconds"]
    medians = {kind: [statistics.median(step["seconds"][kind] for step in found[count]) for count in counts] for kind in kinds}
    seconds = [row(f"{kind}, seconds (median)", [f"{value:.2f}" for value in values]) for kind, values in medians.items()]
    tables = sorted({name for count in counts for step in found[count] for name in step["rows"]})
    rows = [
        row("rows in all", of_steps(lambda step: sum(step["rows"].values()))),
        row("growth of the database, MB", of_steps(lambda step: f"{step['database_mb']:.2f}")),
    ]
    rows += [row(f"rows in `{name}`", of_steps(lambda step, name=name: step["rows"].get(name, 0))) for name in tables]
    calls = [
        row("calls of Prefect's API, without those for log lines", of_steps(lambda step: by_samples(step["calls"]))),
        row("calls for log lines, every 2 s", of_steps(lambda step: sum(step["calls"].get(path, 0) for path in BY_TIME))),
    ]
    memory = psutil.virtual_memory().total / 2**30
    table = "\n".join([row("samples a step", counts), "|--|" + "--:|" * len(counts), *seconds, *calls, *rows])
    machine = (
        f"{psutil.cpu_count()} CPU cores ({platform.machine()}), {memory:.0f} GiB, load {os.getloadavg()[0]:.1f} at the end, "
        f"shared with other work; Python {platform.python_version()}"
    )
    return f"""# What a step costs beside engine and trainer

Steps with {" and ".join(counts)} samples; where a row has several figures, one for each step. Prefect's own server with SQLite, the real
trainer (resident), the tiny model, a scripted engine. *All else* is the whole call of `rl_step` without the engine's tasks (wake, rollout, release,
reload), the trainer's, and the work on samples (draw, score, assemble): Prefect, cache, checks, digests of sources, manifest, pages. About a
second of it is Prefect's own end of a flow run.

```
{command}
```

Machine: {machine}.

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 4096], metavar="N", help=f"multiples of {GROUP_SIZE}")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each")
    parser.add_argument("--page", type=Path, help="write the page here")
    parser.add_argument(
        "--workspace",
        type=Path,
        help="a folder that stays, with its server and figures; a later call adds to them (default: a temporary one)",
    )
    options = parser.parse_args()
    for count in options.samples:
        if count < GROUP_SIZE or count % GROUP_SIZE:
            parser.error(f"--samples {count} is no multiple of {GROUP_SIZE}")
    with contextlib.ExitStack() as stack:
        folder = options.workspace or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["RATCHET_WORKSPACE"] = str(folder)
        os.environ.pop("PREFECT_API_URL", None)
        os.environ["PREFECT_LOGGING_EXTRA_LOGGERS"] = "infra,tasks"  # as prefect.yaml has it
        from flows.cli.services.servers import stop

        if not options.workspace:
            stack.callback(stop)
        kept = folder / "orchestration.json"
        found = json.loads(kept.read_text()) if kept.exists() else {}
        found |= measure(options.samples, options.steps, Path(folder))
        kept.write_text(json.dumps(found, indent=1))
    counts = sorted(found, key=int)
    page = page_of(
        {count: found[count] for count in counts},
        f"python tests/benches/orchestration.py --samples {' '.join(counts)} --steps {options.steps}",
    )
    sys.stdout.write(page)
    if options.page:
        options.page.write_text(page)


if __name__ == "__main__":
    main()
