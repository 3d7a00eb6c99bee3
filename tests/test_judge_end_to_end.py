"""A second model that judges, with the real SGLang twice and the real trainer: what it says in its turn it says alone too."""

from pathlib import Path

import httpx
import pytest

from flows.presets import smoke
from flows.run import rl_run
from infra.colocation.judge_section import server_of
from infra.config import EvaluationConfig, RunConfig
from infra.engines import open_engine, open_judge
from infra.engines.server import server_process
from infra.failures import WrongAnswer
from infra.rewards.judges.cases import JudgeAnswer, JudgeAway, JudgeRequest
from infra.rewards.judges.ledger import Ledger
from infra.runs.manifest import read_manifest
from infra.settings import settings
from infra.store.files import read_json, read_json_lines
from infra.store.layout import JUDGE, Workspace, run_folder
from infra.store.samples import read_samples
from infra.tiny_model.architecture import random_model
from infra.tiny_model.tokenizer import train_tokenizer
from tasks.rewards.by_engine import asker
from tasks.rewards.by_judge_server import version_of

pytestmark = [pytest.mark.end_to_end, pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model than the run's, with random weights."""
    folder, tokenizer = tmp_path_factory.mktemp("judge") / "random-tiny", train_tokenizer()
    tokenizer.save_pretrained(folder)
    random_model("tiny", tokenizer, 1).save_pretrained(folder)
    return folder


def config_of(model: Path, judge: Path) -> RunConfig:
    base = smoke()
    how = {"by": "model", "model": str(judge), "rubric": "{question} {completion}", "score_pattern": r"(\d)"}
    how |= {"max_score": 9, "max_output_tokens": 24, "temperature": 1.0, "server": {"max_context_tokens": 256}}
    return base.but(
        name="r",
        model=str(model),
        num_steps=2,
        data=base.data.but(num_prompts=4),
        sampling=base.sampling.but(group_size=4),
        reward={"name": "rubric", "judge": how, "max_unjudged_frac": 1.0},
        evaluation=EvaluationConfig(every=0),
    )


def said(step: int) -> list[str]:
    """The judge's answers of a step, in the order of its samples."""
    rows = read_json_lines(run_folder("r") / f"steps/{step:06d}/judgements.jsonl")
    return [row["votes"][0]["text"] for row in rows]


def said_alone(config: RunConfig, keys: list[str], requests: list[JudgeRequest]) -> tuple[list[str], list[list[float]]]:
    """Ask the judge's model alone, in the place of the run's engine: its answers, and its log-probs of the golden texts."""
    server, version = server_of(config.engine, config.reward.judge), version_of(config.reward.judge, "alone")
    found: dict[int, JudgeAnswer | JudgeAway] = {}
    asker(server, version, config.reward.judge)(requests, found.__setitem__)
    engine = open_engine(server, version)
    golden = read_json(Workspace.here().golden_references / f"{engine.identity}.json")["since_launch"]
    engine.stop()
    answers = [found[number] for number in range(len(requests))]
    return [each.text for each in answers if isinstance(each, JudgeAnswer)], golden


@pytest.mark.usefixtures("prefect_server", "ends_real_programs")
def test_the_whole_protocol_runs_in_a_step_and_the_judge_says_what_it_says_alone(
    random_tiny: Path, judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[JudgeRequest] = []
    taken = JudgeRequest.__new__
    monkeypatch.setattr(JudgeRequest, "__new__", lambda kind, *fields: asked.append(made := taken(kind, *fields)) or made)
    config = config_of(random_tiny, judge)
    rl_run.with_options(result_storage=settings().results)(config)
    monkeypatch.undo()
    engine, server = server_process.recorded(), server_process.recorded(JUDGE)
    assert engine and server and {engine.launch, server.launch} == {1, 2} and engine.url != server.url, "each started once"
    assert not server.is_awake and server.slept_by == "offload" and server.log_path.name == "judge-0001.log"
    assert server.num_answered and server.num_answered >= 32
    for step in range(2):
        folder = run_folder("r") / f"steps/{step:06d}"
        assert any(each.reward is not None for each in read_samples(folder / "scored.parquet"))
        assert "judging: judge with" in read_manifest(folder).colocation["judge"]
        metrics = read_json(folder / "report.json")["metrics"]
        print({name: round(metrics[name], 2) for name in sorted(metrics) if name.startswith("time/")})

    opened = open_judge(server_of(config.engine, config.reward.judge), version_of(config.reward.judge, "r"))
    assert opened.is_asleep()
    golden = read_json(Workspace.here().golden_references / f"{opened.name}.json")["since_launch"]
    key = server_process.authorization(server.url)
    for path, body in (
        ("/continue_generation", {}),
        ("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}),
    ):
        httpx.post(f"{server.url}{path}", json=body, headers=key, timeout=60).raise_for_status()
    with pytest.raises(WrongAnswer, match="answered 1 requests while it should sleep"):
        opened.is_asleep()
    assert server_process.recorded(JUDGE) is None, "it was ended"

    server_process.stop_recorded()
    by_key = {each.key: each for each in asked}
    with Ledger() as ledger:
        known = ledger.found(by_key)
    texts, golden_alone = said_alone(config, list(by_key), list(by_key.values()))
    assert texts == [known[key].text for key in by_key] and len(texts) == 32
    assert golden == golden_alone, "in float32, to the last bit"
