"""What the benchmarks beside TRL and verl count and print; neither program is here."""

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import process_cpu
from beside_trl import Mark, kind_of, page_of, round_of
from verl_steps import as_hydra, finished_lines

BURN = "import time\nwhile time.process_time() < 0.5: pass\n"
ORPHAN = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {BURN!r}], start_new_session=True)\n"


def test_cpu_seconds_of_orphans_and_of_the_dead_are_counted(tmp_path: Path) -> None:
    """In a process of its own, which adopts them: a program that ends at once, and the one that it leaves behind."""
    program = f"""
import sys, time
from pathlib import Path
from process_cpu import Tree, descendants
tree = Tree()
pid = tree.start([sys.executable, "-c", {ORPHAN!r}], dict(), Path({str(tmp_path / "log")!r}), Path("/"))
codes = {{}}
while pid not in codes or descendants():
    codes |= tree.ended()
    time.sleep(0.01)
print(codes[pid], len(codes), tree.total() >= 0.5)
"""
    path = str(Path(process_cpu.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "0 2 True\n", done.stderr


def test_steps_are_counted_from_the_second_on_and_shown_by_process() -> None:
    now = time.monotonic()
    marks = [Mark(now + 2.0 * step, Counter({"flow": 1.0 * step, "engine": 3.0 * step})) for step in range(5)]
    ours = round_of(marks, [0.1, 0.2, 0.3, 0.4, 0.5])
    assert len(ours.wall) == 3 and {round(value, 6) for value in ours.wall} == {2.0}
    assert ours.cpu == [4.0, 4.0, 4.0] and ours.kinds == {"engine": 3.0, "flow": 1.0}
    theirs = ours._replace(cpu=[2.0, 2.0, 2.0])
    page = page_of({"Ratchet": [ours], "TRL": [theirs]}, "python tests/benches/beside_trl.py")
    assert "| CPU seconds a step: median (range) | 4.00 (4.00 to 4.00) | 2.00 (2.00 to 2.00) | 2.00 |" in page
    assert "by process: engine 3.00, flow 1.00." in page and "* TRL: 0.10, 0.20, 0.30, 0.40, 0.50" in page
    assert kind_of("python -m infra.tracking.upload --owner 1") == "upload" and kind_of("sleep 1") == "others"


def test_a_step_of_verl_counts_when_its_line_is_whole(tmp_path: Path) -> None:
    record = tmp_path / "metrics.jsonl"
    assert not list(finished_lines(record, 0))
    record.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in finished_lines(record, 0)] == [1, 2]
    assert [row["step"] for row in finished_lines(record, 1)] == [2]


def test_text_with_braces_and_quotes_reaches_verl_as_text() -> None:
    assert as_hydra("{% for m in 'ab' %}") == r"'{% for m in \'ab\' %}'"
    assert as_hydra(["q_proj", "k_proj"]) == "['q_proj','k_proj']"
    assert [as_hydra(each) for each in (True, 1e-05, -1)] == ["true", "1e-05", "-1"]
