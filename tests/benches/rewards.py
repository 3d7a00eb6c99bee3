"""What scoring adds to a step: `.venv/bin/python tests/benches/rewards.py [--samples N] [--rollout SECONDS]`.

GSM8K's reward in the flow's process, the same function as a user's file in worker processes (first step, which starts them, and later
ones), and the whole task's part with the journal. Seconds, best and median of five.

With --rollout instead: 512 samples come in the given time, as answers of lognormal length do, and are scored in workers after the last one, or
beside the rollout, or by a judge at an endpoint that takes half a second for an answer. Seconds from the last sample to the last score.
With --arrivals FILE the times are those of a recorded rollout (record_arrivals.py), stretched to that time.

With --math-verify instead: the built-in reward of that name, and the CPU time of the same scores one after the other in one process, divided
by the workers.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
import psutil
from judge_server import Reply, judge_server

from infra.config import RewardConfig, RunConfig
from infra.data.prompts import Prompt
from infra.engines.journal import Journal
from infra.models import base_model
from infra.records import AdapterVersion, BaseModelRef, PromptBatch
from infra.rewards import client
from infra.settings import CHECKOUT
from infra.store.files import record_of, write_json_lines
from infra.store.layout import StepFolder, Workspace
from infra.store.samples import Sample
from infra.tiny_model.tokenizer import train_tokenizer
from tasks.rewards.ahead import scored_ahead
from tasks.rewards.apply import inputs_of, judged
from tasks.rewards.by_model import JudgedWork

GROUP = 8
SOLUTION = "She has 12 pens and buys 30 more, so 12 + 30 = <<12+30=42>>42 pens. " * 6


def asked(num_samples: int) -> tuple[list[Sample], list[Prompt]]:
    prompts = [Prompt(n, n, f"{SOLUTION} How many in case {n}?", "#### 42", [1] * 100, n) for n in range(num_samples // GROUP)]
    samples = [
        Sample(p.prompt_id, i, p.prompt_tokens, [300 + i] * 200, [-0.1] * 200, "stop", 0, "a", f"{SOLUTION}\n#### {41 + i % 2}")
        for p in prompts
        for i in range(GROUP)
    ]
    return samples, prompts


def cpu_s_of_all() -> float:
    """CPU seconds of this process and of all programs that it has now."""
    programs = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(each.cpu_times().user + each.cpu_times().system for each in programs)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


JUDGE_S = 0.5
SLOW = "    time.sleep(0.05)\n"
"""What a reward does that asks a service."""


def beside_a_rollout(folder: Path, seconds_of_rollout: float, recorded: Path | None) -> None:
    os.environ["RATCHET_WORKSPACE"] = str(folder / "workspace")
    train_tokenizer().save_pretrained(folder / "model")
    base = BaseModelRef(id=str(folder / "model"), sha256="0" * 64)
    adapter = AdapterVersion(run="r", version=0, base=base, rank=8, alpha=16, target_modules=("q_proj",), seed=0)
    samples, prompts = asked(512)
    rng = random.Random(0)
    lengths = [rng.lognormvariate(0.0, 0.6) for _ in samples]
    arrivals = sorted((seconds_of_rollout * length / max(lengths), number) for number, length in enumerate(lengths))
    if recorded:
        found = json.loads(recorded.read_text())
        last, first_prompt = max(at for at, *_ in found), min(prompt for _, prompt, *_ in found)
        arrivals = sorted(
            (seconds_of_rollout * at / last, (prompt - first_prompt) * GROUP + index) for at, prompt, index, _ in found
        )
        assert [number for _, number in sorted(arrivals, key=lambda each: each[1])] == list(range(len(samples)))
    for name, body in (("quick", ""), ("50 ms a sample", SLOW)):
        file = folder / "mine.py"
        file.write_text(
            f"import time\ndef score(*, completion, answer):\n{body}    return float(completion[-2:] == answer[-2:])\n"
        )
        config = RunConfig(name="r", reward=RewardConfig(name=f"{file}:score"))
        _compare(name, config, adapter, samples, prompts, arrivals)
    with judge_server(lambda body, number: Reply(delay_s=JUDGE_S)) as server:
        judge = {"base_url": server.url, "model": "none", "rubric": "{question} {completion}"}
        reward = RewardConfig.model_validate({"name": "rubric", "judge": judge})
        _compare(
            f"a judge, {JUDGE_S:g} s a request, 16 at a time",
            RunConfig(name="r", reward=reward),
            adapter,
            samples,
            prompts,
            arrivals,
        )


def _compare(
    name: str,
    config: RunConfig,
    adapter: AdapterVersion,
    samples: list[Sample],
    prompts: list[Prompt],
    arrivals: list[tuple[float, int]],
) -> None:
    for is_ahead in (False, True):
        left = _left_after(config, adapter, samples, prompts, arrivals, is_ahead=is_ahead)
        print(f"{name}, {'beside the rollout' if is_ahead else 'after it'}: {left:.3f} s after the last sample", flush=True)
        client.close_all()
        Workspace.here().judgements.unlink(missing_ok=True)


def _left_after(
    config: RunConfig,
    adapter: AdapterVersion,
    samples: list[Sample],
    prompts: list[Prompt],
    arrivals: list[tuple[float, int]],
    *,
    is_ahead: bool,
) -> float:
    path = write_json_lines(StepFolder.at("r", 0).prompts, [each._asdict() for each in prompts])
    batch = PromptBatch(run="r", step=0, file=record_of(path), num_prompts=len(prompts), dataset_fingerprint="f", first_row=0)
    folder = StepFolder.of(batch)
    work = JudgedWork("r", "step 0", folder.judgements)
    judged(
        config.reward, samples[:GROUP], prompts, folder.scores_journal, {}, work=work
    )  # starts workers, as a step before would have
    folder.scores_journal.unlink(missing_ok=True)
    batch_ahead = batch if is_ahead else batch.model_copy(update={"partial_rollouts": True})  # of these none is scored ahead
    texts = base_model.texts_of(Path(adapter.base.id), [each.output_tokens for each in samples])
    complete = [replace(each, text=text) for each, text in zip(samples, texts, strict=True)]
    began = time.perf_counter()
    with scored_ahead(config, batch_ahead, adapter) as end, Journal(folder.journal, {}) as journal:
        for at, number in arrivals:
            time.sleep(max(0.0, began + at - time.perf_counter()))
            journal.add(samples[number])
        last = time.perf_counter()
        end()
        judged(config.reward, complete, prompts, folder.scores_journal, inputs_of(batch), work=work)
        left = time.perf_counter() - last
    folder.scores_journal.unlink(missing_ok=True)
    folder.journal.unlink()
    return left


FORMULAS = ("\\frac{{{n}}}{{{m}}}", "x^2+{n}x+{m}", "\\sqrt{{{n}}}+{m}", "(x+{n})(x-{m})", "{n}.{m}", "[{n},{m})")
"""Of answers. Completions have them as they are, or with another number."""


def math_verify(num_samples: int) -> None:
    samples, prompts = asked(num_samples)
    answers = [FORMULAS[n % len(FORMULAS)].format(n=n % 90 + 2, m=n % 7 + 1) for n in range(len(prompts))]
    others = [FORMULAS[n % len(FORMULAS)].format(n=n % 90 + 2, m=n % 7 + 2) for n in range(len(prompts))]
    prompts = [each._replace(answer=answer) for each, answer in zip(prompts, answers, strict=True)]
    samples = [
        replace(each, text=f"{SOLUTION}\nSo it is \\boxed{{{(others, answers)[each.sample_index % 2][each.prompt_id]}}}.")
        for each in samples
    ]
    code = (
        "import json, sys, time\nfrom infra.rewards.built_in.math_equal import MathVerify\nreward = MathVerify()\nreward.setup()\n"
        "rows = json.load(sys.stdin)\nreward(completion=rows[0][0], answer=rows[0][1], row={})\nbegan = time.process_time()\n"
        "found = [reward(completion=text, answer=answer, row={}) for text, answer in rows]\n"
        "print(json.dumps([time.process_time() - began, sum(found)]))"
    )
    rows = json.dumps([(each.text, answers[each.prompt_id]) for each in samples])

    def in_series() -> tuple[float, float]:
        done = subprocess.run([sys.executable, "-c", code], input=rows, capture_output=True, text=True, check=True, cwd=CHECKOUT)
        cpu_s, right = json.loads(done.stdout)
        return cpu_s, right

    config, workers = RewardConfig(name="math_verify", workers=2), 2
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "scores.journal"
        for number in range(4):
            cpu_s, right = in_series()
            began, before = time.perf_counter(), cpu_s_of_all()
            scored = judged(config, samples, prompts, journal, {})
            took, used = time.perf_counter() - began, cpu_s_of_all() - before
            journal.unlink(missing_ok=True)
            assert sum(each.reward or 0.0 for each in scored) == right
            print(
                f"{'later' if number else 'first, with the start of the pool'}: {took:.2f} s, {used:.2f} s of CPU; in series {cpu_s:.2f} s of CPU, "
                f"{1000 * cpu_s / len(samples):.2f} ms each; ratio to that divided by {workers} workers {took * workers / cpu_s:.3f}, "
                f"of the CPU times {used / cpu_s:.3f}; "
                f"load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        client.close_all()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--rollout", type=float, default=0.0)
    parser.add_argument("--arrivals", type=Path)
    parser.add_argument("--math-verify", action="store_true")
    options = parser.parse_args()
    if options.rollout:
        with tempfile.TemporaryDirectory() as folder:
            beside_a_rollout(Path(folder), options.rollout, options.arrivals)
        return
    if options.math_verify:
        math_verify(options.samples)
        return
    samples, prompts = asked(options.samples)
    with tempfile.TemporaryDirectory() as folder:
        file, journal = Path(folder) / "mine.py", Path(folder) / "scores.journal"
        file.write_text((CHECKOUT / "infra/rewards/built_in/gsm8k.py").read_text())
        for name in ("gsm8k_numeric", f"{file}:numeric"):

            def score(name: str = name) -> None:
                judged(RewardConfig(name=name), samples, prompts, journal, {})
                journal.unlink(missing_ok=True)

            first, before = seconds(score), cpu_s_of_all()
            later = [seconds(score) for _ in range(5)]
            used = (cpu_s_of_all() - before) / len(later)
            print(
                f"{Path(name).name}: first {first:.3f} s, later best {min(later):.3f} s, median {median(later):.3f} s, {used:.3f} s of CPU each; "
                f"load {os.getloadavg()[0]:.1f}"
            )
        client.close_all()


if __name__ == "__main__":
    main()
