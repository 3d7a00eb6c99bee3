"""Both engines under the same RL loop on this machine's GPUs, in pieces that fit a limit of time.

    python tests/gpu/compare_engines.py OUT [--limit-s 510] [options of ratchet compare-engines]

What is not finished when the limit comes is gone on with by the same command. Where the workspace is gone by then, with the machine, say,
OUT is enough: it holds the blocks (all steps of an engine in a round) that were finished. The report of what there is lies in OUT after
each piece. For the table at the 7B shape, for each MODE of inference and training:

    python tests/gpu/random_model.py qwen2.5-7b /dev/shm/m7b
    RATCHET_VLLM_PYTHON=... RATCHET_SGLANG_PYTHON=... python tests/gpu/compare_engines.py OUT/MODE --mode MODE --model /dev/shm/m7b \
        --num-steps 5 --rounds 1 --num-rollouts 64 --concurrency 64 --num-quality 0 "--sglang-flags=FLAGS"

FLAGS are those of docs/results/h200-two-steps.md.
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from flows.cli.program import chosen_by
from infra.comparison.config import ComparisonConfig, digest_of
from infra.comparison.report import Results
from infra.comparison.results import read_results, write_output
from infra.models import base_model
from infra.settings import CHECKOUT

GRACE_S = 20


def run(arguments: list[str], limit_s: float) -> bool:
    """Whether it came to its end within the limit."""
    command = [sys.executable, "-c", "from flows.cli.app import main; main()", "compare-engines", *arguments]
    # A shell that starts a program in the background has it ignore SIGINT, and so would the child.
    child = subprocess.Popen(command, cwd=CHECKOUT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    try:
        if child.wait(limit_s):
            sys.exit(f"compare-engines exited with {child.returncode}")
        return True
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        return False


def check(config: ComparisonConfig, results: Results) -> None:
    """What must be so on any machine."""
    for backend in config.backends:
        steps = results.of(backend)
        assert len(steps) == config.rounds * config.num_steps, f"{backend}: {len(steps)} steps"
        assert all(request.num_tokens == config.max_output_tokens for step in steps for request in step.requests)
        assert not results.failures(backend), f"{backend}: {results.failures(backend)[0].golden}"
    if config.mode == "training":
        assert all(step.trained_sha256 for step in results.steps), "a step without training"


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit-s", type=float, default=510.0)
    own, rest = parser.parse_known_args()
    arguments = [*rest, "--output", str(own.out.absolute())]
    config = chosen_by(["compare-engines", *arguments]).other(ComparisonConfig())
    is_finished = run(arguments, own.limit_s)
    results = read_results(config, digest_of(config, base_model.reference(config.model).sha256))
    if not is_finished:
        write_output(results)
        print(f"unfinished after {own.limit_s:g} s with {len(results.steps)} steps: run the same again")
        return
    check(config, results)
    print((own.out / "benchmark_report.txt").read_text())
    print("passed")


if __name__ == "__main__":
    main()
