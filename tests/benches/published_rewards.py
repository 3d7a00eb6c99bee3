"""Published reward files as `--reward.name FILE:FUNCTION`, unchanged, against the same functions called directly:

    git clone https://github.com/huggingface/trl; git clone https://github.com/volcengine/verl
    python tests/benches/published_rewards.py TRL_CHECKOUT VERL_CHECKOUT
    python tests/benches/published_rewards.py --run RUN FILE:FUNCTION      the samples of a run's first step, scored again by a direct call

Prints one row a function: whether it is taken, samples, different rewards, samples unjudged, and whether all are equal. verl's files are copied
to a folder of their own, as one copies a file: in verl's package they import ray and tensordict. The direct call is made by a program that
imports nothing of Ratchet.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from infra.config import RewardConfig
from infra.data.prompts import JSON, Prompt
from infra.rewards import client
from infra.runs.manifest import read_manifest
from infra.store.files import read_json_lines
from infra.store.layout import run_folder
from infra.store.samples import Sample, read_samples
from tasks.rewards.apply import judged

DIRECT = """
import importlib.util, json, sys
file, function, kind = sys.argv[1:]
samples = json.load(sys.stdin)
sys.path.insert(0, file.rsplit("/trl/", 1)[0] if kind == "trl" else file.rsplit("/", 1)[0])
if "/trl/rewards/" in file:
    module = importlib.import_module("trl.rewards." + file.rsplit("/", 1)[1].removesuffix(".py"))
else:
    spec = importlib.util.spec_from_file_location("published", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
called, rewards = getattr(module, function), []
if kind == "trl":
    rewards = called(prompts=[each["prompt"] for each in samples], solution=[each["answer"] for each in samples],
        completions=[[{"role": "assistant", "content": each["text"]}] for each in samples], completion_ids=[each["tokens"] for each in samples])
else:
    for each in samples:
        value = called(solution_str=each["text"], ground_truth=each["answer"])
        rewards.append(value["score"] if isinstance(value, dict) else value)
print("\\nREWARDS " + json.dumps([None if each is None else float(each) for each in rewards]))
"""
TRL = (
    ("accuracy_rewards.py", "accuracy_reward"),
    ("accuracy_rewards.py", "reasoning_accuracy_reward"),
    ("format_rewards.py", "think_format_reward"),
)
VERL = (
    "gsm8k.py",
    "math_reward.py",
    "math_dapo.py",
    "search_r1_like_qa_em.py",
    "math_verify.py",
    "prime_math/__init__.py",
    "geo3k.py",
)
ANSWERS = ("42", "\\frac{1}{3}", "x^2+2x+1", "-7", "3,000", "\\sqrt{2}", "(1,2]", "0.5")
OTHER = ("42.0", "\\dfrac13", "(x+1)^2", "7", "3000", "2^{1/2}", "(1,2)", "\\frac12")
FORMS = (
    "So it is #### {}",
    "So it is \\boxed{{{}}}.",
    "<think>\nFirst this.\n</think>\nThe answer is \\boxed{{{}}}",
    "<think>Never ended. \\boxed{{{}}}",
    "Answer: {}",
    "<answer>no</answer> <answer>{}</answer>",
    "{}",
    "\\boxed{{{}",
)


def made(with_target: bool = False) -> tuple[list[Sample], list[Prompt]]:
    """512 samples: 8 answers, each with 64 completions, right ones, other spellings of it, and wrong ones in several forms."""
    prompts, samples = [], []
    for number, answer in enumerate(ANSWERS):
        truth: JSON = {"target": [answer]} if with_target else answer
        row: dict[str, JSON] = {
            "prompt": [{"role": "user", "content": f"Case {number}?"}],
            "solution": f"${answer}$",
            "reward_model": {"ground_truth": truth},
        }
        prompts.append(Prompt(number, number, f"Case {number}?", answer, [1], number, row))
        said = [answer, OTHER[number], ANSWERS[number - 1], "12", "", f"{answer} or 5", f"1{answer}", "\\text{none}"]
        samples += [
            Sample(number, index, [1], [2, index, 2, index], [-0.1] * 4, "stop", 0, "a", form.format(each))
            for index, (form, each) in enumerate((form, each) for form in FORMS for each in said)
        ]
    return samples, prompts


def direct(file: Path, function: str, kind: str, samples: Sequence[Sample], answers: Sequence[JSON]) -> list[float | None]:
    asked = [
        {
            "text": each.text,
            "answer": answer,
            "prompt": [{"role": "user", "content": "?"}],
            "tokens": [int(token) for token in each.output_tokens],
        }
        for each, answer in zip(samples, answers, strict=True)
    ]
    done = subprocess.run(
        [sys.executable, "-c", DIRECT, str(file), function, kind],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        cwd=file.parent,
    )
    found: list[float | None] = json.loads(done.stdout.rsplit("REWARDS ", 1)[1])
    return found


def row_of(file: Path, function: str, kind: str, shown: str, folder: Path) -> str:
    samples, prompts = made(with_target="search_r1" in file.name)
    config = RewardConfig.model_validate(
        {"name": f"{file}:{function}", "max_unjudged_frac": 1.0, "workers": 2, "timeout_s": 30.0}
    )
    try:
        scored = judged(config, samples, prompts, folder / f"{file.stem}-{function}.journal", {})
    except Exception as error:  # noqa: BLE001  # what a user sees for a file that is not taken
        return f"| {shown} | refused: {str(error).splitlines()[0][:300]} |"
    column = "solution" if kind == "trl" else "reward_model"
    answers = [prompts[each.prompt_id].row[column] for each in samples]
    rewards = direct(
        file, function, kind, samples, [each["ground_truth"] if isinstance(each, dict) else each for each in answers]
    )
    ours = [each.reward for each in scored]
    found = sorted({each for each in ours if each is not None})
    equal = sum(mine == theirs for mine, theirs in zip(ours, rewards, strict=True))
    kinds = {each.unjudged.splitlines()[0][:80] for each in scored if each.unjudged}
    return f"| {shown} | {len(ours)} | {len(found)}: {found[:4]} | {ours.count(None)} {kinds or ''} | {equal} |"


def of_run(run: str, name: str) -> str:
    """Compare the first step's rewards with those of a direct call."""
    folder = run_folder(run) / "steps/000000"
    samples = list(read_samples(folder / "scored.parquet"))
    prompts = {each["prompt_id"]: each for each in read_json_lines(folder / "prompts.jsonl")}
    path, _, function = name.rpartition(":")
    kind = "trl" if "/trl/" in path else "verl"
    assert read_manifest(folder).config.reward.name.endswith(name.rsplit("/", 1)[1])
    rows = [prompts[each.prompt_id] for each in samples]
    answers = [
        each["row"]["solution"] if kind == "trl" else each["row"].get("reward_model", {}).get("ground_truth", each["answer"])
        for each in rows
    ]
    rewards = direct(Path(path), function, kind, samples, answers)
    ours = [each.reward for each in samples]
    equal = sum(mine == theirs for mine, theirs in zip(ours, rewards, strict=True))
    return f"{name}: {len(ours)} samples, rewards {sorted({each for each in ours if each is not None})}, equal {equal}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run")
    parser.add_argument("what", nargs="+")
    options = parser.parse_args()
    if options.run:
        print(of_run(options.run, options.what[0]))
        return
    trl, verl = (Path(each).resolve() for each in options.what)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, function in TRL:
            print(row_of(trl / "trl/rewards" / file, function, "trl", f"TRL `{file}:{function}`", folder), flush=True)
        for each in VERL:
            copy = folder / each.replace("/", "_")
            shutil.copy(verl / "verl/utils/reward_score" / each, copy)
            print(row_of(copy, "compute_score", "verl", f"verl `{each}:compute_score`", folder), flush=True)
        client.close_all()


if __name__ == "__main__":
    main()
