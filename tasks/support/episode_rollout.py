"""Rollouts and evaluations whose samples are episodes: journals beside their file, recovered by the inputs that decide them."""

import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from infra.concurrency.event_loop import completed
from infra.concurrency.gc_freeze import pass_over_what_is_here
from infra.config import EngineConfig, EnvironmentConfig, PlayedEnvironment, SamplingConfig
from infra.data.forms import tasksets
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.interface import Engine
from infra.engines.sampling import VERSIONS, begun_by
from infra.environments.carried import NOTHING, CarriedEpisodes, check_adapters, lines_of, num_carried, read_carried
from infra.environments.episode_samples import EpisodeRequest, samples_of
from infra.environments.episodes import EpisodeCounts, EpisodePlayer, fence_of
from infra.environments.journal import EpisodeJournal
from infra.failures import EngineUnavailable, RewardFailed, WrongAnswer
from infra.gateway.session.records import TurnJournal
from infra.records import AdapterVersion, CarriedOver, PromptBatch
from infra.rewards import client
from infra.runs.accounting.unused import note_lost, note_replaced
from infra.runs.bad_answers import save_bad_answer
from infra.store import code_digest
from infra.store.digests import sha256_of
from infra.store.files import read_json_lines, record_of, run_id, sync, verified, write_json, write_json_lines
from infra.store.layout import StepFolder
from infra.store.samples import Sample, write_samples
from infra.telemetry import memory_usage, program_versions
from infra.telemetry.timings import measured, verb_of
from tasks import rewards

log = logging.getLogger(__name__)


def source_of(environment: EnvironmentConfig) -> str:
    """Digest the user's code that plays the episodes: of a program, and of an MCP server, the files that its command names, with the modules that
    a Python script imports; of a taskset its package."""
    if environment.id:
        return tasksets.source_digest(environment.id)
    # Of a server's command the program and its script: further files may be what it writes.
    of_servers = [_digest_of(server.command, num_files=2) for server in environment.mcp_servers if server.command]
    of_code = rewards.source_digest(environment.name) if environment.name else _digest_of(environment.command)
    return " ".join([of_code, *of_servers])


def _digest_of(command: Sequence[str], num_files: int | None = None) -> str:
    """Digest the files that a command names, the first num_files of them."""
    program, *words = command
    files = [Path(found) for found in (shutil.which(program), *words) if found and Path(found).is_file()]
    return " ".join(map(_digest_of_file, files[:num_files]))


def _digest_of_file(file: Path) -> str:
    if file.suffix == ".py":
        with suppress(ValueError):  # of another version of Python, or none at all
            return code_digest.digest_of_foreign("<file>", file, file.parent)
    return sha256_of(file)


def made_from_episodes(inputs: dict[str, str], environment: PlayedEnvironment | None) -> dict[str, str]:
    """Return the inputs that decide the samples; with an environment it is among them."""
    if environment is None:
        return inputs
    return fence_of(inputs, environment, source_of(environment))


def play_what_is_missing(
    engine_config: EngineConfig,
    sampling: SamplingConfig,
    environment: PlayedEnvironment,
    prompts: PromptBatch,
    adapter: AdapterVersion,
    inputs: dict[str, str],
) -> list[Sample]:
    """Return all samples of the step. Episodes and turns that earlier attempts left in the journals are not sampled again."""
    folder, place = StepFolder.of(prompts), (prompts.run, prompts.step, "roll_out")
    timed = (prompts.run, prompts.step, verb_of("roll_out", prompts.draw))
    asked = [Prompt(**row) for row in read_json_lines(verified(prompts.file))]
    request = request_of(engine_config, sampling, environment, asked, adapter, prompts.num_oversampled_prompts)
    carried, num_begin_again = _carried_into(engine_config, prompts, inputs)
    request = request._replace(
        carries_over=prompts.partial_rollouts,
        carried=carried,
        must_be_whole=frozenset(prompt.prompt_id for prompt in asked[: prompts.num_begun_prompts]),
        of=run_id(prompts.run),
    )
    journals = Journals(folder.turns_journal, folder.episodes_journal)
    note_lost(folder.path)
    with measured(*timed) as figures, save_bad_answer(*place):
        engine = open_engine(engine_config, adapter)
        samples, counts, ran = played(engine, request, journals, inputs)
        note_replaced(folder.path)
        folder.samples_inputs.unlink(missing_ok=True)
        write_samples(folder.samples, samples)
        if prompts.partial_rollouts:
            write_json_lines(folder.left_over_episodes, lines_of(counts.left, inputs))
        memory_usage.note(prompts.run, prompts.step, "inference")
        figures["memory_gib"] = engine.memory_in_use_gib()
        figures |= _measures(counts) | {"num_unused": counts.num_unused + num_begin_again}
    log.info(
        "%d episodes, %d of them and %d turns kept from earlier attempts, %d turns lost; %d new output tokens in %.1f s",
        len(request.keys), *counts[:4], figures["seconds"],
    )  # fmt: skip
    made: dict[str, Any] = {"inputs": inputs, "file": record_of(folder.samples).model_dump(), "engine": ran}
    if prompts.partial_rollouts:
        taken = {sample.prompt_id for sample in samples}
        left = CarriedOver(
            prompts=prompts.file,
            prompt_ids=tuple(prompt.prompt_id for prompt in asked if prompt.prompt_id not in taken),
            samples=record_of(folder.left_over_episodes),
            engine_versions=inputs[VERSIONS],
        )
        made["left_over"] = left.model_dump()
    write_json(folder.samples_inputs, made)
    journals.remove()
    return samples


def _carried_into(engine: EngineConfig, prompts: PromptBatch, inputs: dict[str, str]) -> tuple[CarriedEpisodes, int]:
    """Return what the step before carried over, and the number of its episodes that begin again since it cannot be used."""
    if prompts.begun is None:
        return NOTHING, 0
    path = verified(prompts.begun)
    if begun_by(engine, prompts) is None:
        log.warning("what step %d has begun was sampled by other versions of the engine: it begins again", prompts.step - 1)
    elif (carried := read_carried(path, inputs)) is not None:
        return carried, 0
    return NOTHING, num_carried(path)


class Journals(NamedTuple):
    """Files of what earlier attempts have."""

    turns: Path
    episodes: Path

    def remove(self) -> None:
        for path in self:
            path.unlink(missing_ok=True)
        sync(self.turns.parent)


def request_of(
    engine: EngineConfig,
    sampling: SamplingConfig,
    environment: PlayedEnvironment,
    asked: list[Prompt],
    adapter: AdapterVersion,
    num_oversampled: int = 0,
) -> EpisodeRequest:
    return EpisodeRequest(environment, source_of(environment), sampling, engine, adapter, asked, num_oversampled)


def played(
    engine: Engine, request: EpisodeRequest, journals: Journals, inputs: dict[str, str], *, stops: bool = True
) -> tuple[list[Sample], EpisodeCounts, dict[str, Any]]:
    """Return the samples of all episodes, what they took, and what the engine runs. The caller removes the journals when the samples are written.

    stops: Whether too many failed episodes are an error.
    """
    carried, turns = request.carried, TurnJournal(journals.turns, inputs)
    turns.go_on_with(carried.turns, carried.calls, carried.snapshots)
    with turns, EpisodeJournal(journals.episodes, inputs, carried.finished) as episodes:
        ran = woken(engine, request.adapter, inputs)
        counts = _played(engine, request, turns, episodes)
        return samples_of(request, episodes.episodes, stops=stops), counts, ran


def woken(engine: Engine, adapter: AdapterVersion, inputs: dict[str, str]) -> dict[str, Any]:
    """Wake the engine with the adapter; return what it runs.

    Raises:
        EngineUnavailable: if it has other versions than the journals were opened for; the next attempt starts with those.
    """
    engine.wake()
    engine.load_adapter(adapter)
    pass_over_what_is_here()
    ran = engine.ran()
    if (found := program_versions.key_of(ran.versions)) != inputs[VERSIONS]:
        raise EngineUnavailable(f"the engine's environment has changed since this rollout began: {inputs[VERSIONS]} -> {found}")
    return ran.model_dump()


def _played(engine: Engine, request: EpisodeRequest, turns: TurnJournal, episodes: EpisodeJournal) -> EpisodeCounts:
    try:
        counts = completed(EpisodePlayer(request, turns, episodes).play(engine))
        check_adapters(episodes.episodes, request.adapter, request.carried)
    except WrongAnswer:
        for journal in (turns, episodes):
            journal.quarantine("the engine answered wrongly")
        raise
    _check_unchanged(request, turns, episodes)
    return counts


def _check_unchanged(request: EpisodeRequest, turns: TurnJournal, episodes: EpisodeJournal) -> None:
    """Check that one state of the environment's files played all episodes. A program's files are left out: it may write to one that it is given.

    Raises:
        RewardFailed: if they have changed meanwhile; the episodes are played again then, by the files as they are.
    """
    if request.environment.command or source_of(request.environment) == request.source:
        return
    for journal in (turns, episodes):
        journal.quarantine("the environment's files have changed while it played")
    client.forget(request.source)
    raise RewardFailed(
        f"the files of environment {request.environment.label!r} have changed while its episodes were played, some by the old state and some by "
        "the new one: run the same again, and all are played by the files as they are then"
    )


def _measures(counts: EpisodeCounts) -> dict[str, float]:
    return {
        "num_kept": counts.kept_episodes,
        "num_new_output_tokens": counts.num_new_output_tokens,
        "ttft_s": 0.0,
        "last_token_at": counts.last_turn_at,
        "prefix_cache_hit_frac": counts.prefix_cache_hit_frac,
        "num_kept_turns": counts.kept_turns,
        "num_lost_turns": counts.lost_turns,
        **counts.of_episodes,
    }
