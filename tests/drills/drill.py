"""The drill: break every part of a step at every point, run it again, compare with a step that nobody disturbed.

    .venv/bin/python tests/drills/drill.py                          the long form: docs/results/drill.md and drill.json
    .venv/bin/python tests/drills/drill.py --sample                 what ./infra/test runs
    .venv/bin/python tests/drills/drill.py --cell ADDRESS ...       some cells; --list shows the addresses

Cells run side by side, each in a workspace of its own; one that failed keeps its workspace and says how to repeat it.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import forks
import matrix
from matrix import Cell

ROOT = Path(__file__).resolve().parents[2]
NUM_LANES = 2


def main() -> int:
    options = _options()
    if options.list:
        print("\n".join(map(str, (*matrix.matrix(), *matrix.REAL, *matrix.random_cells(matrix.NUM_RANDOM)))))
        return 0
    known = _passed_before(options.known) if options.known else []
    cells = [cell for cell in _chosen(options) if str(cell) not in {outcome["cell"] for outcome in known}]
    folder = Path(options.folder or tempfile.mkdtemp(prefix="ratchet-drill-")).absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begin = time.monotonic()
    sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]  # the product of this checkout, whatever is installed
    forks.preload()
    from session import opened

    needs = {
        *(c.variant for c in cells),
        *("mlflow" for c in cells if c.target in ("mlflow", "delivery") and c.variant != "store"),
    }
    with opened(folder, options.port, needs=needs, keeps=options.keep) as session:
        print(f"{len(cells)} cells in {folder}, servers up after {time.monotonic() - begin:.0f} s", flush=True)
        outcomes = known + _undisturbed(cells, session)
        twins, real = [c for c in cells if c not in matrix.REAL], [c for c in cells if c in matrix.REAL]
        outcomes += _in_lanes(twins, session, options.lanes)
        outcomes += _in_lanes(real, session, 1)  # SGLang and Megatron want both cores
    seconds = time.monotonic() - begin
    failed = [outcome for outcome in outcomes if outcome["problems"]]
    print(f"{len(outcomes)} cells in {seconds:.0f} s: {len(outcomes) - len(failed)} passed, {len(failed)} failed", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps({"seconds": round(seconds, 1), "outcomes": outcomes}, indent=1) + "\n")
    if options.report:
        import drill_report

        drill_report.write(
            ROOT / "docs/results", outcomes, seconds, command="python tests/drills/drill.py --report", num_known=len(known)
        )
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fault drill of an RL step.")
    parser.add_argument("--sample", action="store_true", help="a few cells, for the test command")
    parser.add_argument(
        "--cell", action="append", default=[], metavar="ADDRESS", help="such as roll_out.middle/engine/SIGKILL; several"
    )
    parser.add_argument("--only", metavar="WORD", help="cells of the matrix whose address contains this")
    parser.add_argument("--every", type=int, metavar="N", help="every N-th cell of the matrix")
    parser.add_argument("--random", type=int, metavar="N", help="N kills at random moments")
    parser.add_argument("--list", action="store_true", help="show all addresses")
    parser.add_argument("--lanes", type=int, default=NUM_LANES, help="cells side by side (default: %(default)s)")
    parser.add_argument("--port", type=int, default=25300, help="first of the ports that are used (default: %(default)s)")
    parser.add_argument("--folder", help="where workspaces and logs lie (default: a new temporary folder)")
    parser.add_argument("--keep", action="store_true", help="keep the workspaces of cells that passed, too")
    parser.add_argument("--json", metavar="FILE", help="write the outcomes")
    parser.add_argument(
        "--known", metavar="FILE", help="outcomes.jsonl of a drill that was cut off: what passed there is not done again"
    )
    parser.add_argument("--report", action="store_true", help="write docs/results/drill.md and drill.json")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> list[Cell]:
    chosen = [matrix.cell_of(address) for address in options.cell]
    if options.sample:
        chosen += matrix.SAMPLE
    if options.only:
        found = [cell for cell in (*matrix.matrix(), *matrix.REAL) if options.only in str(cell)]
        if not found:
            sys.exit(f"error: no cell that can be run here has {options.only!r} in its address; --list shows all addresses")
        chosen += found
    if options.every:
        chosen += matrix.matrix()[:: options.every]
    if options.random:
        chosen += matrix.random_cells(options.random)
    return list(dict.fromkeys(chosen)) or [*matrix.matrix(), *matrix.random_cells(matrix.NUM_RANDOM), *matrix.REAL]


def _passed_before(path: str) -> list[dict[str, object]]:
    """The cells that passed in a drill that was cut off. Undisturbed runs (target nobody) are made again."""
    outcomes = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [outcome for outcome in outcomes if not outcome["problems"] and outcome["target"] != "nobody"]


def _undisturbed(cells: Sequence[Cell], session: "object") -> list[dict[str, object]]:
    """The digest that all others must have; made once with twins, once with episodes and once with the real parts."""
    from session import Undisturbed

    outcomes = []
    for variant in sorted({matrix.SAME_DIGEST.get(cell.variant, cell.variant) for cell in cells}):
        outcome = _run(Cell("undisturbed", "nobody", "none", variant), session, 0)
        if outcome["problems"]:
            raise SystemExit(f"the undisturbed run fails: {outcome['problems']}")
        made = Undisturbed(outcome["digest"], outcome["attempt_s"])
        session.remember_undisturbed(variant, made)  # type: ignore[attr-defined]
        outcomes.append(outcome)
    return outcomes


def _in_lanes(cells: Sequence[Cell], session: "object", num_lanes: int) -> list[dict[str, object]]:
    """Each lane is a process that forks flow processes; it takes the next cell when it has finished one."""
    if not cells:
        return []
    context = multiprocessing.get_context("fork")
    following = context.Value("i", 0)
    results = context.SimpleQueue()
    lanes = [context.Process(target=_lane, args=(cells, session, lane, following, results)) for lane in range(num_lanes)]
    for lane in lanes:
        lane.start()
    try:
        outcomes = [results.get() for _ in cells]
    finally:
        for lane in lanes:
            lane.join(timeout=5)
            lane.terminate()
    return sorted(outcomes, key=lambda outcome: [str(cell) for cell in cells].index(str(outcome["cell"])))


def _lane(cells: Sequence[Cell], session: "object", lane: int, following: "object", results: "object") -> None:
    while True:
        with following.get_lock():  # type: ignore[attr-defined]
            number = following.value  # type: ignore[attr-defined]
            following.value += 1  # type: ignore[attr-defined]
        if number >= len(cells):
            return
        results.put(_run(cells[number], session, lane))  # type: ignore[attr-defined]


def _run(cell: Cell, session: "object", lane: int) -> dict[str, object]:
    from cell import run_cell

    outcome = run_cell(cell, session, lane)._asdict()  # type: ignore[arg-type]
    with (session.folder / "outcomes.jsonl").open("a") as lines:  # type: ignore[attr-defined]  # a drill that is cut off leaves what it found
        lines.write(json.dumps(outcome) + "\n")
    is_skipped = str(outcome["struck"]).startswith("skipped: ")
    verdict = "FAILED" if outcome["problems"] else outcome["struck"] if is_skipped else "passed"
    recovered = "" if outcome["recover_s"] is None else f", recovered in {outcome['recover_s']:.1f} s"
    print(f"{verdict}  {cell}  {outcome['seconds']:.1f} s{recovered}", flush=True)
    if outcome["problems"]:
        for problem in outcome["problems"]:
            print(f"    {problem}", flush=True)
        print(f"    again: {os.path.relpath(sys.executable)} tests/drills/drill.py --cell '{cell}'", flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
