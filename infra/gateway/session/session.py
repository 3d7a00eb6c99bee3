"""A session: one episode's conversations with the model. Messages in, tokens out; every token that was sampled stays as it was sampled.

A request is matched to what is on record. Up to the latest answer that the agent left unchanged, the tokens on record are taken; only what
is new behind it is rendered. An agent that changed an earlier message continues at the answer before it: a branch.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from infra.engines.interface import TurnRequest
from infra.gateway.rendering.interface import ConversationRenderer, Tools
from infra.gateway.rendering.messages import BadRequest, ChatMessage
from infra.gateway.session.counts import SessionCounts
from infra.gateway.session.records import TurnRecord, tokens_digest
from infra.gateway.session.tracks import WITHOUT_MESSAGES, Point, Track, point_of, text_point_of, tokens_point_of
from infra.gateway.session.turn import Query, Turn, TurnAnswer, done
from infra.store.samples import Sample
from infra.trajectories.segments import StopReason, Trajectory

Sampler = Callable[[TurnRequest], Awaitable[Sample]]


class EpisodeEnded(RuntimeError):
    """The episode is over: no further turn is sampled. The message says why."""

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Episode(NamedTuple):
    """Whose turns a session samples."""

    key: str
    """Unique in its rollout, and the same when the rollout is repeated."""
    prompt_id: int
    sample_index: int
    seed: int
    """Its turns' sampling seeds are derived from it."""


class TurnLimits(NamedTuple):
    """How turns are sampled."""

    temperature: float
    max_output_tokens: int
    """Longest answer of a turn."""
    max_context_tokens: int
    """Longest prompt with its answer."""
    max_turns: int | None = None
    """Answers an episode may get; None: no limit."""
    keep_reasoning: bool = True
    """Keep sampled reasoning in the context, token for token. False: each turn is a trajectory of its own, rendered by the template."""
    has_many_conversations: bool = False
    """One without room in the context ends no other."""
    ignore_eos: bool = False
    """See sampling.ignore_eos."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end an answer, for requests that name them."""


class Session:
    """Not for several threads: all calls come from one event loop."""

    def __init__(
        self,
        episode: Episode,
        renderer: ConversationRenderer,
        limits: TurnLimits,
        sampler: Sampler,
        on_turn: Callable[[TurnRecord], object] = lambda record: None,
        recorded: Sequence[TurnRecord] = (),
    ) -> None:
        """on_turn: Called with each complete turn before the agent gets it. recorded: Turns of earlier attempts. An equal request, by its
        tokens, gets the recorded answer; each is given once."""
        self.episode, self.renderer, self.limits, self.sampler, self.on_turn = episode, renderer, limits, sampler, on_turn
        self.tracks: list[Track] = []
        self.counts = SessionCounts()
        self.stop_reason: StopReason | None = None
        self.is_begun = False
        self._num_recorded = self._num_new = self._num_begun = 0
        self._turns: dict[str, list[Turn]] = {}
        """By the digest of the prompt's tokens."""
        self._tasks: set[asyncio.Task[TurnRecord]] = set()
        self._restore(recorded)

    def _restore(self, recorded: Sequence[TurnRecord]) -> None:
        prompts: dict[int, list[int]] = {}
        outputs = {record.number: record.output_tokens for record in recorded}
        for record in sorted(recorded, key=lambda each: each.number):
            before = [] if record.base is None else [*prompts[record.base], *outputs[record.base]]
            prompts[record.number] = [*before, *record.given_tokens]
            turn = Turn(done(record), record.max_new_tokens)
            self._turns.setdefault(tokens_digest(prompts[record.number]), []).append(turn)
            self._num_new = self._num_recorded = record.number + 1

    def begin_episode(self, *, keeps_turns: bool) -> None:
        """Begin the episode. If a worker that was lost had begun it, it begins again.

        keeps_turns: Whether equal requests get the turns of the worker that was lost, also one under way. If not, these are lost work.
        """
        if self.is_begun:
            self._begin_again(keeps_turns)
        self.is_begun = True

    def _begin_again(self, keeps_turns: bool) -> None:
        self.counts = self.counts.begun_again(lost_turns=0 if keeps_turns else self._num_new)
        self._num_recorded = self._num_new if keeps_turns else 0
        self.tracks, self.stop_reason, self._num_begun = [], None, 0
        if not keeps_turns:
            self._turns = {}
            for task in self._tasks:
                task.cancel()
        for turn in (turn for turns in self._turns.values() for turn in turns):
            turn.is_begun = turn.is_delivered = turn.is_registered = False
            turn.is_waited_for = lambda: False

    async def ask(self, messages: Sequence[ChatMessage], tools: Tools = (), max_tokens: int | None = None) -> TurnAnswer:
        """Answer a request of an agent in this process, which has the answer when this returns."""
        answer = await self.begin(messages, tools, max_tokens)
        answer.delivered()
        return answer

    async def begin(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools = (),
        max_tokens: int | None = None,
        is_waited_for: Callable[[], bool] = lambda: True,
    ) -> TurnAnswer:
        """Answer a request; the caller says when it is delivered.

        is_waited_for: Whether the agent that sent the request still waits. If not, an equal request gets the answer.

        Raises:
            EpisodeEnded: if the episode is over, or ends because this request has no room in the context or would be a turn too many.
        """
        return await self.complete(self.query(messages, tools, max_tokens), is_waited_for)

    @property
    def _continued(self) -> list[Track]:
        """The tracks that a request may continue."""
        return self.tracks if self.limits.keep_reasoning else []

    def query(self, messages: Sequence[ChatMessage], tools: Tools, max_tokens: int | None) -> Query:
        messages, listed = list(messages), json.dumps(list(tools), sort_keys=True)
        point = point_of(self._continued, messages, listed)
        prompt = self._extended(point, messages) if point else None
        if point is None or prompt is None:
            return self._checked(Query(messages, listed, self.renderer.render(messages, tools), None, 0, tools), max_tokens)
        # The messages on record have the reasoning that the agent may have left out.
        messages = [*point.track.messages[: point.end.num_messages], *messages[point.end.num_messages :]]
        return self._checked(Query(messages, listed, prompt, point, 0, tools), max_tokens)

    def text_query(self, text: str, max_tokens: int | None) -> Query:
        """A prompt without messages. Where it begins as a sequence on record does, only its rest is encoded: without the token that ended the
        answer, which is on record and in no answer's text, where an agent that writes the template itself puts it behind the answer."""
        point, rest = text_point_of(self._continued, text) or (None, text)
        known = point.track.tokens[: point.end.num_tokens] if point else []
        new = rest.removeprefix(self.renderer.text.special(known[-1])) if known else rest
        if not new:  # nothing would be given between two answers
            point, rest, known, new = None, text, [], text
        return self._without_messages(point, [*known, *self.renderer.text.raw_ids(new)], rest, max_tokens)

    def tokens_query(self, tokens: list[int], max_tokens: int | None) -> Query:
        point = tokens_point_of(self._continued, tokens)
        new = tokens[point.end.num_tokens if point else 0 :]
        if (unknown := self.renderer.text.unknown(new)) is not None:  # no engine takes one, and some end with it
            raise BadRequest(f"token id {unknown} is not in the model's vocabulary")
        rest = self.renderer.text.decode_all(new)
        return self._without_messages(point, tokens, rest, max_tokens)

    def _without_messages(self, point: Point | None, prompt: list[int], rest: str, max_tokens: int | None) -> Query:
        before = point.track.messages[: point.end.num_messages] if point else []
        return self._checked(Query([*before, ChatMessage("user", rest)], WITHOUT_MESSAGES, prompt, point, 0, ()), max_tokens)

    def messages_after(self, turn_id: str) -> list[ChatMessage]:
        """The conversation up to an answer, by its id; empty if it has no such answer."""
        ends = ((track, end) for track in self.tracks for end in track.ends)
        return next((track.messages[: end.num_messages] for track, end in ends if track.turn_id(end) == turn_id), [])

    def _extended(self, point: Point, messages: Sequence[ChatMessage]) -> list[int] | None:
        """The tokens on record and those of the new messages; None where the renderer changed the former."""
        known = point.track.tokens[: point.end.num_tokens]
        prompt = self.renderer.bridge_to_next_turn(list(known), messages[point.end.num_messages :])
        if prompt[: len(known)] != known:
            self.counts.prefix_mismatches += 1
            return None
        return prompt

    def _checked(self, query: Query, max_tokens: int | None) -> Query:
        """Raises EpisodeEnded if no turn may follow."""
        room = self.limits.max_context_tokens - len(query.prompt)
        # After the last turn is begun, it may be asked for again.
        if self.stop_reason and (self.stop_reason != "max_turns" or room < 1):
            raise EpisodeEnded(self.stop_reason, f"the episode has ended ({self.stop_reason}): no further turn is sampled")
        if room < 1:
            self.stop_reason = None if self.limits.has_many_conversations else "context"
            lengths = f"the conversation has {len(query.prompt)} tokens, the context is {self.limits.max_context_tokens}"
            raise EpisodeEnded("context", f"{lengths}: the episode ends here")
        wanted = self.limits.max_output_tokens if max_tokens is None else min(max_tokens, self.limits.max_output_tokens)
        return query._replace(max_new_tokens=min(wanted, room), digest=tokens_digest(query.prompt))

    async def complete(self, query: Query, is_waited_for: Callable[[], bool]) -> TurnAnswer:
        begun = time.monotonic()
        self.counts.first_at = self.counts.first_at or begun
        answer = await self._completed(query, is_waited_for)
        self.counts.model_s += time.monotonic() - begun
        return answer

    async def _completed(self, query: Query, is_waited_for: Callable[[], bool]) -> TurnAnswer:
        turns = self._turns.setdefault(query.digest, [])
        turn = next((each for each in turns if each.is_free and each.max_new_tokens == query.max_new_tokens), None)
        if turn is None or not turn.is_begun:
            self._begin_turn()
        if turn is None:
            task = asyncio.create_task(self._sample(query, self._seed(query.digest, len(turns))))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            turn = Turn(task, query.max_new_tokens)
            turns.append(turn)
        turn.is_begun, turn.is_waited_for = True, is_waited_for
        # The turn goes on where the agent's connection is lost: its answer is kept for an equal request.
        record = await asyncio.shield(turn.record)
        if not turn.is_registered:
            self._register(turn, query, record)
        assert turn.answer is not None
        return TurnAnswer(turn.answer, record, query.prompt, query.digest, turn)

    def _begin_turn(self) -> None:
        """Count a turn before it is sampled, so that requests in parallel get no more of them. Raises EpisodeEnded if all are begun."""
        if self.limits.max_turns is not None and self._num_begun >= self.limits.max_turns:
            self.stop_reason = "max_turns"
            raise EpisodeEnded("max_turns", f"the episode had its {self.limits.max_turns} turns and ends here")
        self._num_begun += 1

    def _seed(self, digest: str, number: int) -> int:
        """A turn's seed, in 31 bits, by its prompt's tokens: it does not depend on the order in which concurrent requests come.

        number: Of the turn among those with these tokens.
        """
        words = f"{self.episode.seed}/{self.episode.sample_index}/{digest}/{number}"
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4]) >> 1

    async def _sample(self, query: Query, seed: int) -> TurnRecord:
        episode, point, limits = self.episode, query.point, self.limits
        about = (episode.prompt_id, episode.sample_index, query.prompt, seed)
        request = TurnRequest(*about, limits.temperature, query.max_new_tokens, limits.ignore_eos)
        sample = await self.sampler(request)
        number, self._num_new = self._num_new, self._num_new + 1
        record = TurnRecord(
            episode=episode.key,
            number=number,
            base=point.end.record.number if point else None,
            given_tokens=query.prompt[point.end.num_tokens if point else 0 :],
            output_tokens=list(sample.output_tokens),
            output_logprobs=list(sample.output_logprobs),
            finish_reason=sample.finish_reason,
            adapter_version=sample.adapter_version,
            adapter_sha256=sample.adapter_sha256,
            seed=seed,
            max_new_tokens=query.max_new_tokens,
        )
        self.on_turn(record)
        return record

    def _register(self, turn: Turn, query: Query, record: TurnRecord) -> None:
        """Put a turn on record, where its request continues it."""
        call_ids = f"call_{query.digest[:16]}_{record.number}_"
        answer = (
            ChatMessage("assistant", self.renderer.text.decode(record.output_tokens))
            if query.tools == WITHOUT_MESSAGES
            else self.renderer.parse(record.output_tokens, query.listed_tools, call_ids)
        )
        point = query.point
        if point is not None and point.is_last:
            track = point.track
        else:
            # A branch has the tokens before its own answer as given: each sampled token is trained in one trajectory.
            self.counts.branches += bool(self.tracks) and self.limits.keep_reasoning
            track = Track(query.tools, first_turn=0 if self.limits.keep_reasoning else len(self.tracks))
            self.tracks.append(track)
        num_before = len(track.tokens)
        track.add_turn(query.messages, answer, query.prompt, record)
        turn.is_registered, turn.answer = True, answer
        self.counts.turns += 1
        self.counts.recorded_turns += record.number < self._num_recorded
        self.counts.sampled_tokens += len(record.output_tokens)
        self.counts.given_tokens += len(query.prompt) - num_before

    def trajectories(self, stop_reason: StopReason | None = None) -> list[Trajectory]:
        """The episode's trajectories, by their first turn.

        stop_reason: Why it ended; None: as far as the session knows.
        """
        reason = self.stop_reason or stop_reason
        return [Trajectory(self.episode.key, tuple(track.segments), branch, reason) for branch, track in enumerate(self.tracks)]

    async def close(self) -> None:
        """Cancel the turns under way."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
