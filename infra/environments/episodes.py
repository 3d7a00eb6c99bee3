"""Play the episodes of a rollout: workers run the environment, the engine samples their turns through the gateway.

    flow process                                      pool of workers (infra.rewards)
      engine <-- session <-- gateway (HTTP) <-- turn --  environment or agent
                   |
      turns.journal (each complete turn)  episodes.journal (each finished episode)

After a kill, a finished episode is taken from its journal. Another one is played again: while its observations are those on record, each
turn that was complete is given back and not sampled again. So it is if only a worker is killed. With restore = "snapshot" the environment gets
its state back and makes none of its steps again. With restore = "restart" it starts again, and its turns are lost work.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import orjson

from infra.config import (
    HOW_EPISODES_RUN,
    MAX_EPISODE_WORKERS,
    EnvironmentConfig,
    PlayedEnvironment,
    RewardConfig,
    RewardFunction,
)
from infra.config.players import check_fields
from infra.data.forms import tasksets
from infra.data.prompts import Prompt
from infra.engines.interface import Engine
from infra.engines.replicas.routed_turns import replica_counts
from infra.environments.carried import NOTHING, CarriedEpisodes
from infra.environments.episode_samples import UNKNOWN, EpisodeRequest
from infra.environments.groups import Enough
from infra.environments.journal import EpisodeJournal, FinishedEpisode, Key
from infra.environments.parts import AGENT, HARNESS, RESTART, STOP, STOPS, TOOL_ERRORS, TURN
from infra.environments.runner import PlayedEpisode
from infra.environments.verifiers_tasks.episode_parts import NOT_IN_NAMES
from infra.gateway.http.server import Gateway, OpenSession
from infra.gateway.rendering.admission import renderer_of
from infra.gateway.session.calls import Calls
from infra.gateway.session.records import TurnJournal, TurnRecord
from infra.gateway.session.session import Episode, TurnLimits
from infra.gateway.session.snapshots import Snapshots
from infra.models import base_model
from infra.progress import work as progress
from infra.rewards import client
from infra.rewards.outcome import EXCEPTION, Outcome, unjudged
from infra.store import code_digest

log = logging.getLogger(__name__)

PLAY, PLAY_TASKSET = "infra.environments.runner.play", "infra.environments.verifiers_tasks.playing.play"
MARGIN_S = 30.0
"""What a worker gets beyond the episode's own limit before it is ended."""
MEMORY_FRAC, WORKER_BYTES, TASKSET_WORKER_BYTES = 0.25, 64 * 2**20, 320 * 2**20
"""Share of the machine's memory for workers if their number is not set, and what one is taken to need; one of verifiers is larger."""


class EpisodeCounts(NamedTuple):
    """What a rollout of episodes took."""

    kept_episodes: int
    """Finished by earlier attempts."""
    kept_turns: int
    """Given back from the record."""
    lost_turns: int
    """Complete turns that were sampled again, because the environment declares restart."""
    num_new_output_tokens: int
    last_turn_at: float
    """When the latest new turn was complete, in seconds since the epoch; 0: there was none."""
    prefix_cache_hit_frac: float
    of_episodes: dict[str, float]
    """Figures of the episodes that this attempt played, summed: branches, prefix_mismatches, tool_calls, tool_errors (in all and
    by tool), resumed, stopped (begun, and not needed any more), carried_turns (that the step before has sampled), model_s, environment_s."""
    num_unused: int
    """Episodes that were begun, are in no group of the rollout, and are not carried over."""
    left: CarriedEpisodes
    """What is carried over."""


def check(config: EnvironmentConfig, source: str) -> bool:
    """Have a worker import the environment. Returns whether it declares restore = "restart".

    Raises:
        ValueError: in one line, if it cannot be used.
    """
    found: list[Outcome] = []
    _play(config, source, [_checked(config)], lambda index, outcome: found.append(outcome))
    if found[0].reward is None:
        named, said = f"environment {config.label!r}", found[0].message.removeprefix("raised ValueError: ")
        raise ValueError(said if said.startswith(f"{named} ") else f"{named}: {said}")
    parts = found[0].parts or {}
    check_fields(config, ["agent" if AGENT in parts else "class"] if config.name else ["harness"] if HARNESS in parts else [])
    return RESTART in parts


def _checked(config: EnvironmentConfig) -> PlayedEpisode:
    """What a worker is given to check that the environment can be used."""
    return PlayedEpisode(
        config.name,
        None,
        command=config.command,
        taskset=config.id,
        repeats_tools=config.repeats_tools,
        mcp=[list(each) for each in config.mcp_servers],
        tool_timeout_s=config.tool_timeout_s,
    )


def pool_of(config: EnvironmentConfig) -> RewardConfig:
    """Return the pool's settings: an environment is called as a reward is."""
    return RewardConfig(
        name=PLAY,
        timeout_s=config.episode_timeout_s + MARGIN_S,
        workers=config.workers or most_workers(TASKSET_WORKER_BYTES if config.id else WORKER_BYTES),
        memory_mib=config.memory_mib,
        environment=config.variables,
    )


def most_workers(worker_bytes: int) -> int:
    """Return how many workers a pool has where environment.workers does not say it; it starts no more than there are episodes."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(MAX_EPISODE_WORKERS, int(MEMORY_FRAC * memory) // worker_bytes))


def _play(config: EnvironmentConfig, source: str, tasks: Sequence[PlayedEpisode], take: client.OnOutcome) -> None:
    """Have workers play. Those of a taskset run in verifiers' own environment."""
    function, python = (PLAY_TASKSET, tasksets.interpreter()) if config.id else (PLAY, None)
    rows = [orjson.dumps({"row": task._asdict()}) for task in tasks]
    client.judge(pool_of(config), RewardFunction(name=function), source, rows, take, one_at_a_time=True, python=python)


class EpisodePlayer:
    """Plays the episodes that the journals do not have."""

    def __init__(self, request: EpisodeRequest, turns: TurnJournal, episodes: EpisodeJournal) -> None:
        self.request, self.turns, self.episodes = request, turns, episodes
        self.folder = base_model.locate(request.adapter.base.id)
        self.restarts = check(request.environment, request.source)
        self.kept = len(set(episodes.episodes) - set(request.carried.finished))
        self.groups = request.whole_groups(episodes.episodes)
        self.kept_turns = self.lost_turns = self.num_new = 0
        self.last_turn_at = 0.0
        self.figures: Counter[str] = Counter()

    async def play(self, engine: Engine) -> EpisodeCounts:
        """Play all missing episodes.

        Raises:
            EngineUnavailable, EngineRefused, WrongAnswer: as Engine.generate does.
            RewardFailed: if workers are lost again and again.
        """
        sampling, config = self.request.sampling, self.request.engine
        stops = frozenset(base_model.stop_token_ids(self.folder))
        limits = TurnLimits(
            sampling.temperature,
            sampling.max_output_tokens,
            config.max_context_tokens,
            max_turns=None if self.request.environment.id else self.request.environment.max_turns,  # verifiers counts its own
            keep_reasoning=self.request.environment.keep_reasoning,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=stops,
        )
        async with engine.turns(self.request.adapter) as turns:
            async with Gateway.serving(turns, renderer_of(self.folder), limits, self._add) as gateway:
                missing = (
                    []
                    if self.groups.are_enough
                    else [
                        (prompt, index)
                        for prompt, index in self.request.keys
                        if (prompt.prompt_id, index) not in self.episodes.episodes
                        and not self._may_not_begin_again(prompt, index)
                    ]
                )
                opened = [self._opened(gateway, prompt, index) for prompt, index in missing]
                await asyncio.to_thread(self._played, missing, opened)
                gateway.raise_failure()
            hits = turns.num_cached_tokens / turns.num_prompt_tokens if turns.num_prompt_tokens else 0.0
        self.figures.update(replica_counts(turns))
        others = CarriedEpisodes(self.turns.records, self.turns.calls, self.turns.snapshots, self.episodes.episodes).of(
            {prompt.prompt_id for prompt in self.request.prompts} - set(self.groups.prompt_ids)
        )
        carries = self.request.carries_over
        figures: dict[str, float] = dict(self.figures)
        return EpisodeCounts(
            self.kept,
            self.kept_turns,
            self.lost_turns,
            self.num_new,
            self.last_turn_at,
            hits,
            figures,
            num_unused=0 if carries else len(others.keys),
            left=others if carries else NOTHING,
        )

    def _add(self, record: TurnRecord) -> None:
        self.turns.add(record)
        self.num_new += len(record.output_tokens)
        self.last_turn_at = time.time()

    def _may_not_begin_again(self, prompt: Prompt, index: int) -> bool:
        """Whether an episode that would begin again has made effects that may not be made twice. It has failed then."""
        name = f"{prompt.prompt_id}/{index}"
        made = [call for key in _attempts(self.turns.calls, name) for call in self.turns.calls[key] if not call.is_idempotent]
        if not self.restarts or not made:
            return False
        problem = f"declares restore 'restart' and has called {made[0].name!r}, which is not idempotent: it may not begin again"
        self.episodes.add((prompt.prompt_id, index), FinishedEpisode([], unjudged(UNKNOWN, problem)))
        self.groups.add((prompt.prompt_id, index))
        return True

    def _opened(self, gateway: Gateway, prompt: Prompt, index: int) -> OpenSession:
        name = f"{prompt.prompt_id}/{index}"
        attempts = _attempts(self.turns.records, name)
        recorded = self.turns.records.get(name, [])
        if self.restarts:
            self.lost_turns += sum(len(self.turns.records[key]) for key in attempts)
            name, recorded = f"{name}/{len(attempts)}" if attempts else name, []
        calls = Calls(name, self.turns.add_call, self.turns.calls.get(name, ()), self.request.of)
        saved = self.turns.snapshots.get(name)
        is_whole = saved is not None and len(recorded) >= saved.num_turns
        snapshots = Snapshots(calls, self.turns.add_snapshot, saved if is_whole else None)
        episode = Episode(name, prompt.prompt_id, index, prompt.seed)
        return gateway.open_session(episode, recorded, calls=calls, snapshots=snapshots, restarts=self.restarts)

    def _played(self, missing: Sequence[tuple[Prompt, int]], opened: Sequence[OpenSession]) -> None:
        tasks = [self._task(prompt, each) for (prompt, _), each in zip(missing, opened, strict=True)]
        with progress.work("playing", len(tasks), "episodes") as work:

            def take(number: int, outcome: Outcome) -> None:
                work.done += 1
                prompt, index = missing[number]
                self._finish((prompt.prompt_id, index), opened[number], outcome)
                self.groups.add((prompt.prompt_id, index))
                if self.groups.are_enough and work.done < len(tasks):
                    raise Enough  # which ends the pool, with the episodes under way

            with suppress(Enough):
                _play(self.request.environment, self.request.source, tasks, take)
        finished = {(prompt.prompt_id, index) for prompt, index in missing} & set(self.episodes.episodes)
        for (prompt, index), each in zip(missing, opened, strict=True):
            if (prompt.prompt_id, index) not in finished and each.session.is_begun:
                self.figures.update({**_figures_of(each), "stopped": 1})

    def _task(self, prompt: Prompt, opened: OpenSession) -> PlayedEpisode:
        config = self.request.environment
        return PlayedEpisode(
            environment=config.name,
            command=config.command,
            taskset=config.id,
            repeats_tools=config.repeats_tools,
            # Without an answer none is given: one that is empty may fit anything.
            task={"question": prompt.question, **({"answer": prompt.answer} if prompt.answer else {}), **prompt.row},
            base_url=opened.base_url,
            api_key=opened.api_key,
            model=opened.model,
            max_turns=config.max_turns,
            turn_timeout_s=config.turn_timeout_s,
            episode_timeout_s=config.episode_timeout_s,
            max_observation_tokens=config.max_observation_tokens,
            tokenizer=str(self.folder / "tokenizer.json"),
            tool_timeout_s=config.tool_timeout_s,
            max_result_characters=config.max_result_characters,
            mcp=[list(each) for each in config.mcp_servers],
        )

    def _finish(self, key: Key, opened: OpenSession, outcome: Outcome) -> None:
        session = opened.session
        counts = session.counts
        recorded = len(self.turns.records.get(session.episode.key, [])) - counts.lost_turns
        parts = outcome.parts or {}
        stop = STOPS[int(parts.get(STOP, STOPS.index("failed")))]
        trajectories = session.trajectories(stop)
        is_game = any(name.startswith(TURN) for name in parts)
        if opened.calls.is_outcome_unknown:
            outcome = unjudged(
                UNKNOWN, "called a tool that is not idempotent, and its effect is not known or not of this episode"
            )
        elif is_game and (counts.branches or recorded != counts.turns):
            outcome = unjudged(
                EXCEPTION, f"has {recorded} turns on record and got {counts.turns}: its observations differ from those on record"
            )
        elif outcome.reward is not None and not trajectories:
            outcome = unjudged(EXCEPTION, "ended without a turn")
        carried = min(counts.recorded_turns, len(self.request.carried.turns.get(session.episode.key, ())))
        self.kept_turns += counts.recorded_turns - carried
        self.figures.update({"carried_turns": carried} if carried else {})
        self.lost_turns += counts.lost_turns
        self.figures.update(_figures_of(opened))
        self.episodes.add(key, FinishedEpisode(trajectories, outcome))


def _figures_of(opened: OpenSession) -> dict[str, float]:
    counts, calls = opened.session.counts, opened.calls
    by_tool: Counter[str] = Counter()
    for name, num in calls.errors.items():
        by_tool[f"{TOOL_ERRORS}{NOT_IN_NAMES.sub('_', name)[:64]}"] += num
    return {
        "branches": counts.branches,
        "prefix_mismatches": counts.prefix_mismatches,
        "tool_calls": len(calls.by_key),
        "tool_errors": calls.errors.total(),
        **by_tool,
        "resumed": opened.snapshots.num_resumed,
        "model_s": counts.model_s,
        "environment_s": counts.environment_s,
    }


def _attempts(journaled: Iterable[str], name: str) -> list[str]:
    """Return the keys of an episode's attempts."""
    return [key for key in journaled if key == name or key.startswith(f"{name}/")]


def fence_of(inputs: dict[str, str], config: PlayedEnvironment, source: str) -> dict[str, str]:
    """Return the inputs key of a rollout with this environment."""
    decides = config.model_dump_json(exclude=HOW_EPISODES_RUN)
    code = code_digest.digest("infra.environments")
    return inputs | {"environment": decides, "environment_source": source, "environment_code": code}
