"""Ask the questions of an inspect-ai task, and take its scores.

    flow process                                            inspect-ai's environment
      engine <-- one session <-- gateway (HTTP) <-- turn --   the task's solvers and scorers
                    |
      turns.journal (each complete turn)

After a kill the task runs again from its beginning: an equal request, by its token ids, gets the recorded answer.
"""

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from infra.config import EngineConfig, EvalSamplingConfig
from infra.data.prompts import Prompt
from infra.engines.interface import Engine
from infra.environments.inspect_tasks import running
from infra.environments.inspect_tasks.running import InspectJob
from infra.gateway.http.server import Gateway
from infra.gateway.rendering.admission import renderer_of
from infra.gateway.session.records import TurnJournal, TurnRecord
from infra.gateway.session.session import Episode, TurnLimits
from infra.models import base_model
from infra.records import AdapterVersion
from infra.rewards.outcome import EXCEPTION, NO_NUMBER, PART_NAME, WHOLE_REWARD
from infra.store.samples import Sample

EPISODE = "inspect"
"""All conversations of a task are one session's."""
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_ .:/-]")
"""What names of MLflow's metrics may not hold."""
NUM_DIGITS = 16
"""Of a prompt's digest, which begin a turn's id; its number follows."""


class InspectRequest(NamedTuple):
    """One way of asking a task's questions."""

    task: str
    num_prompts: int
    sampling: EvalSamplingConfig
    engine: EngineConfig
    adapter: AdapterVersion
    folder: Path
    """For inspect-ai's log, the program's output and its result."""
    timeout_s: float
    variables: tuple[str, ...]
    """Names of variables that the task gets, as in reward.environment."""


class Answered(NamedTuple):
    questions: list[Prompt]
    samples: list[Sample]
    """By question and answer, with their rewards."""
    metrics: dict[str, float]
    """inspect-ai's own figures, by scorer/metric."""
    errors: list[str]
    """Of samples that failed, in one line each."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the questions and their answers."""
        rows = [[question.question, question.answer] for question in self.questions]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


async def ask(engine: Engine, request: InspectRequest, journal: TurnJournal) -> Answered:
    """Run the task once.

    Raises:
        EngineUnavailable, EngineRefused, WrongAnswer: as Engine.generate does.
        ValueError: if the task fails. EvaluationLost: if its program is lost.
    """
    sampling, folder = request.sampling, base_model.locate(request.adapter.base.id)
    limits = TurnLimits(
        sampling.temperature, sampling.max_output_tokens, request.engine.max_context_tokens, has_many_conversations=True
    )
    renderer = renderer_of(folder)
    async with engine.turns(request.adapter) as turns, Gateway.serving(turns, renderer, limits, journal.add) as gateway:
        opened = gateway.open_session(Episode(EPISODE, 0, 0, 0), journal.records.get(EPISODE, []))
        spec = InspectJob(
            task=running.named(request.task),
            base_url=opened.base_url,
            limit=request.num_prompts,
            epochs=sampling.group_size,
            temperature=sampling.temperature,
            max_tokens=sampling.max_output_tokens,
            max_connections=request.engine.running_requests,
            log_dir=str(request.folder),
            result=str(request.folder / "scored.json"),
        )
        log = request.folder / "program.log"
        made = await asyncio.to_thread(running.run, spec, opened.api_key, log, request.timeout_s, request.variables)
    return answered(made, journal.records.get(EPISODE, []), request.adapter)


def answered(made: dict[str, Any], records: list[TurnRecord], adapter: AdapterVersion) -> Answered:
    """made: The program's result; its samples are by epoch and place in the task."""
    by_id: dict[str, int] = {}
    rows = made["samples"]
    for row in rows:
        by_id.setdefault(str(row["id"]), len(by_id))
    of_turn = {record.number: record for record in records}
    samples = [_sample(row, by_id[str(row["id"])], of_turn, adapter) for row in rows]
    questions = [
        Prompt(by_id[str(row["id"])], by_id[str(row["id"])], row["question"], row["answer"], [], 0)
        for row in rows
        if row["epoch"] == 1
    ]
    return Answered(
        questions=questions,
        samples=sorted(samples, key=lambda sample: sample.episode),
        metrics={NOT_IN_NAMES.sub("_", name): value for name, value in sorted(made["metrics"].items()) if value is not None},
        errors=[row["error"] for row in rows if row["error"]],
    )


def _sample(row: dict[str, Any], number: int, records: dict[int, TurnRecord], adapter: AdapterVersion) -> Sample:
    """The answer that was scored, with its tokens; none where the sample failed before it had one."""
    turn = records[int(row["turn"].partition("-")[2][NUM_DIGITS:])] if row["turn"] else None
    scores = {name: value for name, value in row["parts"].items() if value is not None and PART_NAME.fullmatch(name)}
    is_judged = not row["error"] and None not in row["parts"].values() and bool(scores)
    return Sample(
        prompt_id=number,
        sample_index=row["epoch"] - 1,
        prompt_tokens=_prompt_of(turn, records) if turn else [],
        output_tokens=turn.output_tokens if turn else [],
        output_logprobs=turn.output_logprobs if turn else [],
        finish_reason=turn.finish_reason if turn else "error",
        adapter_version=turn.adapter_version if turn else adapter.version,
        adapter_sha256=turn.adapter_sha256 if turn else adapter.sha256,
        text=row["completion"],
        reward=next(iter(scores.values())) if is_judged else None,
        reward_parts=(scores if len(scores) > 1 else {WHOLE_REWARD: next(iter(scores.values()))}) if is_judged else None,
        unjudged="" if is_judged else EXCEPTION if row["error"] else NO_NUMBER,
    )


def _prompt_of(turn: TurnRecord, records: dict[int, TurnRecord]) -> list[int]:
    if turn.base is None:
        return turn.given_tokens
    before = records[turn.base]
    return [*_prompt_of(before, records), *before.output_tokens, *turn.given_tokens]
