"""Sessions without HTTP: what is extended, what is a branch, what is answered again. Trained tokens are counted from what the sampler saw."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from conversations import TOOL, MakeModel, random_given, random_text
from transformers import AutoTokenizer

from infra.engines.interface import TurnRequest
from infra.gateway.http.chat_api import chat_answer
from infra.gateway.http.fields import CHAT, RESPONSES, checked_fields
from infra.gateway.http.responses_api import response_query
from infra.gateway.rendering.admission import renderer_of
from infra.gateway.rendering.interface import ConversationRenderer
from infra.gateway.rendering.messages import ChatMessage
from infra.gateway.session.records import TurnJournal, TurnRecord
from infra.gateway.session.session import Episode, EpisodeEnded, Session, TurnLimits
from infra.store.samples import Sample
from infra.trajectories.segments import Trajectory

EPISODE = Episode("7/1", prompt_id=7, sample_index=1, seed=11)
LIMITS = TurnLimits(temperature=1.0, max_output_tokens=64, max_context_tokens=4096)
ASKS, GOES_ON = ChatMessage("user", "Hi"), ChatMessage("user", "Go on")


class SeenSampler:
    """Answers with tokens of the seed, as an engine could: words cut as no tokenizer would cut them. Remembers what it saw."""

    def __init__(self, renderer: ConversationRenderer, texts: Sequence[str] = ()) -> None:
        self.renderer, self.texts = renderer, list(texts)
        self.seen: list[tuple[list[int], list[int], int]] = []
        """Prompt, answer and seed of each turn."""
        self.may_go_on: Awaitable[object] | None = None

    async def __call__(self, request: TurnRequest) -> Sample:
        rng = random.Random(request.seed)
        text = self.texts.pop(0) if self.texts else f"a{random_text(rng)}b"
        output = [token for letter in text for token in self.renderer.text.ids([letter])][: request.max_new_tokens - 1]
        output.append(self.renderer.text.id_of("<|im_end|>"))
        self.seen.append((list(request.tokens), output, request.seed))
        if self.may_go_on is not None:
            await self.may_go_on
        logprobs = [-rng.random() for _ in output]
        return Sample(request.prompt_id, request.sample_index, request.tokens, output, logprobs, "stop", 3, "sha")


@pytest.fixture
def renderer(model_of: MakeModel, workspace: Path) -> ConversationRenderer:
    return renderer_of(model_of("Qwen2.5"))


Script = Callable[[Session, SeenSampler], Awaitable[None]]


def run(renderer: ConversationRenderer, script: Script, limits: TurnLimits = LIMITS, texts: Sequence[str] = ()) -> Session:
    async def all_of_it() -> Session:
        sampler = SeenSampler(renderer, texts)
        session = Session(EPISODE, renderer, limits, sampler)
        await script(session, sampler)
        return session

    return asyncio.run(all_of_it())


def num_unsampled_trained(trajectories: Sequence[Trajectory], seen: Sequence[tuple[list[int], list[int], int]]) -> int:
    """Tokens marked as sampled that no answer to exactly these tokens before has, and sampled tokens that are nowhere, or twice."""
    expected = {(tuple(prompt), tuple(output)) for prompt, output, _ in seen}
    found, wrong = [], 0
    for trajectory in trajectories:
        before: tuple[int, ...] = ()
        for segment in trajectory.segments:
            if segment.kind == "sampled":
                found.append((before, segment.tokens))
                wrong += 0 if found[-1] in expected else len(segment.tokens)
            before += segment.tokens
    return wrong + len(expected - set(found)) + len(found) - len(set(found))


def test_an_answer_sent_back_keeps_its_tokens(renderer: ConversationRenderer) -> None:
    async def script(session: Session, sampler: SeenSampler) -> None:
        first = await session.ask([ASKS])
        back = replace(first.message, content=f" {first.message.content}\n")  # as clients tidy it up
        await session.ask([ASKS, back, GOES_ON])
        (prompt, output, seed), (second_prompt, _, other_seed) = sampler.seen
        assert second_prompt[: len(prompt) + len(output)] == prompt + output
        assert renderer.render([ASKS, first.message, GOES_ON], []) != second_prompt  # which another cut of the words would be
        assert seed != other_seed
        assert num_unsampled_trained(session.trajectories(), sampler.seen) == 0

    session = run(renderer, script)
    (trajectory,) = session.trajectories("done")
    assert [segment.kind for segment in trajectory.segments] == ["given", "sampled", "given", "sampled"]
    assert [segment.turn for segment in trajectory.segments] == [0, 0, 1, 1]
    assert {segment.adapter_sha256 for segment in trajectory.segments if segment.is_sampled} == {"sha"}
    assert (session.counts.turns, session.counts.branches, session.counts.prefix_mismatches) == (2, 0, 0)
    assert session.counts.sampled_tokens + session.counts.given_tokens == len(trajectory.tokens)


def test_a_thousand_random_conversations_train_sampled_tokens_only(renderer: ConversationRenderer) -> None:
    rng = random.Random(3)
    totals = [0, 0, 0]

    async def script(session: Session, sampler: SeenSampler) -> None:
        messages = [ChatMessage("user", random_text(rng))]
        for _ in range(rng.randrange(1, 5)):
            answer = await session.ask(messages, [TOOL])
            messages = [*messages, answer.message, *random_given(rng, bool(answer.message.tool_calls))]
            if rng.random() < 0.15:  # an agent that edits its history
                index = rng.randrange(len(messages))
                messages[index] = replace(messages[index], content=f"edited {random_text(rng)}", tool_calls=())
            if rng.random() < 0.05:  # and a sub-agent
                await session.ask([ChatMessage("user", f"aside: {random_text(rng)}")])
        assert num_unsampled_trained(session.trajectories(), sampler.seen) == 0
        totals[0] += len(sampler.seen)

    for _ in range(1000):
        session = run(renderer, script, texts=[CALL] if rng.random() < 0.5 else [])
        totals[1] += session.counts.branches
        totals[2] += session.counts.prefix_mismatches
    assert totals[0] > 2000
    assert totals[1] > 100
    assert totals[2] == 0


def test_changed_answers_and_other_conversations_are_branches_and_are_counted(renderer: ConversationRenderer) -> None:
    async def script(session: Session, sampler: SeenSampler) -> None:
        first = await session.ask([ASKS])
        second = await session.ask([ASKS, first.message, GOES_ON])
        await session.ask([ASKS, first.message, GOES_ON])  # again: another answer
        await session.ask([ASKS, replace(first.message, content="I never said that"), GOES_ON])
        await session.ask([ASKS, first.message, GOES_ON, second.message, GOES_ON])
        await session.ask([ChatMessage("system", "another"), ASKS])
        assert sampler.seen[1][0] == sampler.seen[2][0]
        assert sampler.seen[1][2] != sampler.seen[2][2]
        assert num_unsampled_trained(session.trajectories(), sampler.seen) == 0

    session = run(renderer, script)
    assert session.counts.branches == 3
    assert [trajectory.num_turns for trajectory in session.trajectories()] == [3, 1, 1, 1]
    assert [trajectory.branch for trajectory in session.trajectories()] == [0, 1, 2, 3]


def test_concurrent_continuations_of_one_answer_are_branches(renderer: ConversationRenderer) -> None:
    async def script(session: Session, sampler: SeenSampler) -> None:
        first = await session.ask([ASKS])
        await asyncio.gather(*(session.ask([ASKS, first.message, ChatMessage("user", word)]) for word in ("one", "two", "one")))
        assert num_unsampled_trained(session.trajectories(), sampler.seen) == 0

    assert run(renderer, script).counts.branches == 2


def test_a_renderer_that_changes_tokens_on_record_is_caught(
    renderer: ConversationRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rendered_again(tokens: list[int], messages: Sequence[ChatMessage]) -> list[int]:
        return [*tokens[:-3], *tokens[-2:], *renderer.render(messages, [])]

    monkeypatch.setattr(renderer, "bridge_to_next_turn", rendered_again)

    async def script(session: Session, sampler: SeenSampler) -> None:
        first = await session.ask([ASKS])
        await session.ask([ASKS, first.message, GOES_ON])
        assert num_unsampled_trained(session.trajectories(), sampler.seen) == 0

    session = run(renderer, script)
    assert session.counts.prefix_mismatches == 1
    assert [trajectory.num_turns for trajectory in session.trajectories()] == [1, 1]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = "<think>\nadd\n</think>\n\nIt is 42."


def test_reasoning_stays_in_the_context_where_qwen3s_template_would_drop_it(model_of: MakeModel, workspace: Path) -> None:
    qwen3 = renderer_of(model_of("Qwen3"))

    async def script(session: Session, sampler: SeenSampler) -> None:
        first = await session.ask([ASKS])
        assert (first.message.reasoning, first.message.content) == ("add", "It is 42.")
        await session.ask([ASKS, replace(first.message, reasoning=None), GOES_ON])  # agents leave reasoning out
        assert num_unsampled_trained(session.trajectories(), sampler.seen) == 0

    kept = run(qwen3, script, texts=[THOUGHT])
    (trajectory,) = kept.trajectories()
    assert "add" in qwen3.text.decode(list(trajectory.segments[1].tokens))
    dropped = run(qwen3, script, DROPS, [THOUGHT])
    _, second = dropped.trajectories()
    assert [(segment.kind, segment.turn) for segment in second.segments] == [("given", 1), ("sampled", 1)]
    assert "add" not in qwen3.text.decode(list(second.segments[0].tokens))
    assert (kept.counts.branches, dropped.counts.branches) == (0, 0)


DROPS = LIMITS._replace(keep_reasoning=False)


def test_without_reasoning_each_turn_of_a_thousand_conversations_has_the_context_of_qwen3s_template(
    model_of: MakeModel, workspace: Path
) -> None:
    folder, rng = model_of("Qwen3"), random.Random(4)
    qwen3, template, num_dropped = renderer_of(folder), AutoTokenizer.from_pretrained(str(folder)), 0

    async def script(session: Session, sampler: SeenSampler) -> None:
        nonlocal num_dropped
        messages = [ChatMessage("user", random_text(rng))]
        for number in range(rng.randrange(1, 5)):
            answer = await session.ask(messages, [TOOL])
            if number and rng.random() < 0.1:  # transformers is slow
                talk = [message.to_json() for message in messages]
                expected = template.apply_chat_template(talk, tools=[TOOL], add_generation_prompt=True, return_dict=False)
                assert answer.prompt == list(expected)
                text = qwen3.text.decode(answer.prompt)
                num_dropped += text.count("<think>") < sum(message.reasoning is not None for message in messages)
            messages = [*messages, answer.message, *random_given(rng, bool(answer.message.tool_calls))]
        assert num_unsampled_trained(session.trajectories(), sampler.seen) == 0
        assert [trajectory.num_turns for trajectory in session.trajectories()] == [1] * len(sampler.seen)
        assert [trajectory.segments[0].turn for trajectory in session.trajectories()] == [*range(len(sampler.seen))]

    for _ in range(1000):
        texts = [rng.choice((THOUGHT, "It is 43.", CALL)) for _ in range(4)]
        session = run(qwen3, script, DROPS, texts)
        assert (session.counts.branches, session.counts.prefix_mismatches) == (0, 0)
    assert num_dropped > 10


def test_without_reasoning_a_prompt_without_messages_is_a_trajectory_too(renderer: ConversationRenderer) -> None:
    async def script(session: Session, sampler: SeenSampler) -> None:
        first = await session.complete(session.text_query("1 + 1 =", None), lambda: True)
        tokens = [*first.prompt, *first.record.output_tokens, 5]
        second = await session.complete(session.tokens_query(tokens, None), lambda: True)
        third = await session.complete(session.text_query(f"1 + 1 ={first.message.content} So", None), lambda: True)
        assert second.prompt == tokens and [each.record.base for each in (first, second, third)] == [None] * 3

    session = run(renderer, script, DROPS)
    assert [trajectory.num_turns for trajectory in session.trajectories()] == [1, 1, 1]
    assert session.counts.branches == 0


def test_a_template_that_an_agent_writes_itself_ends_each_answer_once(renderer: ConversationRenderer) -> None:
    async def script(session: Session, sampler: SeenSampler) -> None:
        text, more = (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
            "\n<|im_start|>user\nOn<|im_end|>\n<|im_start|>assistant\n",
        )
        for _ in range(3):
            answer = await session.complete(session.text_query(text, None), lambda: True)
            assert renderer.text.decode_all(answer.prompt) == text
            answer.delivered()
            whole = f"{text}{answer.message.content}<|im_end|>"
            text = f"{whole}{more}"
        assert len(session.tracks) == 1 and session.counts.branches == 0
        assert renderer.text.decode_all(session.text_query(whole, None).prompt) == whole

    session = run(renderer, script)
    assert [trajectory.num_turns for trajectory in session.trajectories()] == [3]


def test_reasoning_that_responses_leave_out_is_not_changed(model_of: MakeModel, workspace: Path) -> None:
    async def script(session: Session, sampler: SeenSampler) -> None:
        first = await session.ask([ASKS])
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": first.message.content}]}

        def point(**thought: object) -> object:
            items = [{"role": "user", "content": "Hi"}, {"type": "reasoning", "summary": [], **thought}, said]
            content = {"model": "policy", "input": [*items, {"role": "user", "content": "Go on"}]}
            return response_query(session, checked_fields(content, RESPONSES, "policy", 1.0)).point

        assert first.message.reasoning == "Hm."
        assert point(content=[{"type": "reasoning_text", "text": "Hm."}]) and point() and point(content=[])
        assert not point(content=[{"type": "reasoning_text", "text": "Oh."}])

    run(renderer_of(model_of("Qwen3")), script, texts=["<think>\nHm.\n</think>\n\nIt is 4."])


def test_the_bytes_of_a_part_of_a_character_are_not_known(renderer: ConversationRenderer) -> None:
    async def script(session: Session, sampler: SeenSampler) -> None:
        answer = await session.ask([ASKS])
        fields = checked_fields({"model": "policy", "messages": [], "logprobs": True}, CHAT, "policy", 1.0)
        entries = chat_answer(answer, fields, "policy", renderer.text, 0)["choices"][0]["logprobs"]["content"]
        found = [entry["bytes"] for entry in entries[:-1]]
        assert found[0] == [97] and found[-1] == [98] and None in found
        assert all(known is None or bytes(known).decode() == entry["token"] for known, entry in zip(found, entries, strict=False))
        assert list("\ufffd".encode()) not in found

    run(renderer, script, texts=["a東b"])


def test_an_id_of_a_response_of_another_session_is_none_of_this_one(renderer: ConversationRenderer) -> None:
    async def script(session: Session, sampler: SeenSampler) -> None:
        for limits in (LIMITS, DROPS):
            session.limits = limits
            first = await session.ask([ASKS])
            second = await session.ask([ASKS, first.message, GOES_ON])
            assert session.messages_after(first.turn_id) == [ASKS, first.message]
            assert session.messages_after(second.turn_id) == [ASKS, first.message, GOES_ON, second.message]
            assert session.messages_after("f" * 16 + first.turn_id[16:]) == []

    run(renderer, script)


def test_no_room_in_the_context_ends_the_episode_with_its_reason(renderer: ConversationRenderer) -> None:
    async def script(session: Session, sampler: SeenSampler) -> None:
        first = await session.ask([ASKS])
        assert len(first.prompt) + len(first.record.output_tokens) <= 100
        with pytest.raises(EpisodeEnded, match=r"tokens, the context is 100: the episode ends here"):
            await session.ask([ASKS, first.message, ChatMessage("user", "long " * 60)])
        with pytest.raises(EpisodeEnded, match=r"has ended \(context\)"):
            await session.ask([ASKS])

    session = run(renderer, script, LIMITS._replace(max_context_tokens=100))
    assert [trajectory.stop_reason for trajectory in session.trajectories("done")] == ["context"]


def test_of_many_conversations_one_without_room_ends_no_other(renderer: ConversationRenderer) -> None:
    async def script(session: Session, sampler: SeenSampler) -> None:
        with pytest.raises(EpisodeEnded, match=r"tokens, the context is 100"):
            await session.ask([ChatMessage("user", "long " * 100)])
        await session.ask([ASKS])

    session = run(renderer, script, LIMITS._replace(max_context_tokens=100, has_many_conversations=True))
    assert len(session.trajectories("done")) == 1


def test_an_episode_gets_no_more_than_its_turns(renderer: ConversationRenderer) -> None:
    async def script(session: Session, sampler: SeenSampler) -> None:
        first = await session.ask([ASKS])
        with pytest.raises(EpisodeEnded, match="had its 1 turns and ends here"):
            await session.ask([ASKS, first.message, GOES_ON])

    session = run(renderer, script, LIMITS._replace(max_turns=1))
    assert [trajectory.stop_reason for trajectory in session.trajectories("done")] == ["max_turns"]


def test_requests_in_parallel_get_no_more_than_the_episodes_turns(renderer: ConversationRenderer) -> None:
    async def script(session: Session, sampler: SeenSampler) -> None:
        sampler.may_go_on = asyncio.sleep(0.01)
        asked = [session.begin([ChatMessage("user", f"question {number}")]) for number in range(3)]
        first, *others = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(each) for each in others] == [EpisodeEnded] * 2 and len(sampler.seen) == 1
        assert not isinstance(first, BaseException)

    session = run(renderer, script, LIMITS._replace(max_turns=1))
    assert [trajectory.stop_reason for trajectory in session.trajectories("done")] == ["max_turns"]


def test_the_last_turn_whose_connection_was_lost_may_be_asked_for_again(renderer: ConversationRenderer) -> None:
    async def script(session: Session, sampler: SeenSampler) -> None:
        lost = await session.begin([ASKS], is_waited_for=lambda: False)
        with pytest.raises(EpisodeEnded, match="had its 1 turns"):
            await session.ask([GOES_ON])
        assert (await session.ask([ASKS])).record is lost.record and len(sampler.seen) == 1
        with pytest.raises(EpisodeEnded, match="had its 1 turns"):
            await session.ask([ASKS])

    run(renderer, script, LIMITS._replace(max_turns=1))


def test_turns_on_record_count_once_they_are_asked_for(renderer: ConversationRenderer) -> None:
    """So an agent that is played again has all its turns, also where it asks for others than before."""

    async def episode(recorded: Sequence[TurnRecord], *asked: ChatMessage) -> list[TurnRecord]:
        records = list(recorded)
        session = Session(EPISODE, renderer, LIMITS._replace(max_turns=2), SeenSampler(renderer), records.append, recorded)
        session.begin_episode(keeps_turns=True)
        for _ in range(2):  # the second time as after a worker was lost
            for each in asked:
                await session.ask([each])
            with pytest.raises(EpisodeEnded, match="had its 2 turns"):
                await session.ask([ChatMessage("user", "One more")])
            session.begin_episode(keeps_turns=True)
        return records

    before = asyncio.run(episode([], ASKS, GOES_ON))
    assert len(before) == 2
    assert asyncio.run(episode(before, ASKS, GOES_ON)) == before
    assert len(asyncio.run(episode(before, ASKS, ChatMessage("user", "Other")))) == 3


@pytest.mark.parametrize("keep_reasoning", [True, False])
def test_a_killed_episode_gets_its_recorded_turns_again_and_samples_none_twice(
    keep_reasoning: bool, renderer: ConversationRenderer, tmp_path: Path
) -> None:
    async def episode(num_turns: int) -> tuple[Session, SeenSampler]:
        sampler = SeenSampler(renderer)
        with TurnJournal(tmp_path / "turns.journal", {"adapter": "sha"}) as journal:
            recorded = list(journal.records.get(EPISODE.key, ()))

            def on_turn(record: TurnRecord) -> None:
                journal.add(record)

            limits = LIMITS._replace(keep_reasoning=keep_reasoning)
            session = Session(EPISODE, renderer, limits, sampler, on_turn, recorded)
            messages = [ASKS]
            for _ in range(num_turns):
                answer = await session.ask(messages)
                messages = [*messages, answer.message, GOES_ON]
            return session, sampler

    asyncio.run(episode(2))
    resumed, sampler = asyncio.run(episode(4))
    assert len(sampler.seen) == 2
    assert (resumed.counts.turns, resumed.counts.recorded_turns) == (4, 2)
    (tmp_path / "turns.journal").unlink()
    undisturbed, _ = asyncio.run(episode(4))
    assert [each.sha256 for each in resumed.trajectories()] == [each.sha256 for each in undisturbed.trajectories()]


def test_turns_of_another_adapter_are_not_given_again(renderer: ConversationRenderer, tmp_path: Path) -> None:
    record = TurnRecord(EPISODE.key, 0, None, [1], [2], [-0.5], "stop", 3, "sha", 5, 64)
    with TurnJournal(tmp_path / "turns.journal", {"adapter": "sha"}) as journal:
        journal.add(record)
    with TurnJournal(tmp_path / "turns.journal", {"adapter": "sha"}) as journal:
        assert journal.records == {EPISODE.key: [record]}
    with TurnJournal(tmp_path / "turns.journal", {"adapter": "other"}) as journal:
        assert journal.records == {}


def test_a_turn_whose_agent_is_gone_is_journaled_and_given_to_the_next_equal_request(renderer: ConversationRenderer) -> None:
    async def script(session: Session, sampler: SeenSampler) -> None:
        records: list[TurnRecord] = []
        session.on_turn = records.append
        go_on: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sampler.may_go_on = go_on
        lost = asyncio.create_task(session.begin([ASKS], is_waited_for=lambda: False))
        await asyncio.sleep(0)
        again = asyncio.create_task(session.ask([ASKS]))
        await asyncio.sleep(0)
        lost.cancel()
        go_on.set_result(None)
        answer = await again
        assert (len(sampler.seen), records) == (1, [answer.record])
        assert len((await session.ask([ASKS])).record.output_tokens) and len(sampler.seen) == 2

    assert run(renderer, script).counts.turns == 2
