"""Which replica makes which sample: each sample has one owner, and moves only where its request was not sent or its owner is lost."""

import time
from collections import Counter

import pytest

from infra.data.prompts import Prompt
from infra.engines.interface import SampleRequest
from infra.engines.replicas import assignment, routing
from infra.engines.replicas.assignment import Assignment
from infra.store.samples import Sample


def wanted(num_prompts: int, group_size: int) -> list[SampleRequest]:
    prompts = [Prompt(n, n, "?", "#### 4", [4, 5, 6 + n], seed=70 + n) for n in range(num_prompts)]
    return [SampleRequest(prompt, index) for prompt in prompts for index in range(group_size)]


def sample_of(request: SampleRequest) -> Sample:
    prompt_id, index = request.key
    return Sample(prompt_id, index, [4], [5], [-1.0], "stop", 1, "digest")


class Taken:
    """Takes each sample once, as a rollout does."""

    def __init__(self, count: int) -> None:
        self.keys: list[tuple[int, int]] = []
        self.count = count

    def __call__(self, sample: Sample) -> bool:
        self.keys.append((sample.prompt_id, sample.sample_index))
        return len(self.keys) < self.count


def owners(shares: dict[int, list[SampleRequest]]) -> dict[tuple[int, int], int]:
    return {request.key: replica for replica, share in shares.items() for request in share}


@pytest.mark.parametrize(("num_prompts", "replicas"), [(64, [0, 1]), (64, [0, 1, 2, 3]), (6, [0, 1, 2]), (1, [0, 1])])
def test_groups_stay_whole_and_no_replica_has_more_than_its_part(num_prompts: int, replicas: list[int]) -> None:
    assignment = Assignment(wanted(num_prompts, 8), Taken(num_prompts * 8))
    shares = assignment.shares(replicas)
    found = owners(shares)
    assert len(found) == num_prompts * 8
    assert all(len({found[p, index] for index in range(8)}) == 1 for p in range(num_prompts))
    assert max(map(len, shares.values())) <= num_prompts * 8 / len(replicas) + 8


def test_a_prompt_keeps_its_replica_when_another_is_lost() -> None:
    loads = dict.fromkeys(range(4), 0)
    before = {prompt: routing.choose(prompt, loads, 1) for prompt in range(200)}
    without = {replica: 0 for replica in loads if replica != 2}
    after = {prompt: routing.choose(prompt, without, 1) for prompt in range(200)}
    assert {prompt for prompt in before if before[prompt] != after[prompt]} == {p for p in before if before[p] == 2}
    assert min(Counter(before.values()).values()) > 30 and set(Counter(before.values())) == set(loads)


def test_a_full_replica_passes_a_prompt_on_and_the_least_loaded_takes_it_if_all_are_full() -> None:
    first = routing.choose(5, {0: 0, 1: 0}, 4)
    assert routing.choose(5, {first: 4, 1 - first: 0}, 4) == 1 - first
    assert routing.choose(5, {first: 7, 1 - first: 9}, 4) == first


def test_a_lost_replica_s_unfinished_samples_go_to_the_others_and_its_late_answers_are_not_taken() -> None:
    asked = wanted(8, 2)
    taken = Taken(16)
    assignment = Assignment(asked, taken)
    shares = assignment.shares([0, 1, 2])
    done, late = shares[1][0], shares[1][1]
    for request in (done, late):
        assert assignment.begins(1, request.key)
    assert assignment.take(1, sample_of(done))
    moved = assignment.lost(1, [0, 2])
    assert set(owners(moved)) == {request.key for request in shares[1]} - {done.key}
    assert 1 not in moved
    assert assignment.take(1, sample_of(late)) and taken.keys == [done.key], "its new owner makes it"
    new_owner = owners(moved)[late.key]
    assert assignment.begins(new_owner, late.key) and not assignment.begins(1, late.key)
    assignment.take(new_owner, sample_of(late))
    assert taken.keys == [done.key, late.key]


def test_an_idle_replica_takes_half_of_what_waits_at_the_busiest_and_nothing_that_was_sent() -> None:
    assignment = Assignment(wanted(8, 2), Taken(16))
    shares = assignment.shares([0, 1])
    sent = shares[1][:3]
    for request in sent:
        assert assignment.begins(1, request.key)
    waiting = [request.key for request in shares[1][3:]]
    moved = [request.key for request in assignment.overflow(0)]
    assert moved == waiting[len(waiting) // 2 :]
    assert not any(assignment.begins(1, key) for key in moved) and all(assignment.begins(0, key) for key in moved)
    while more := assignment.overflow(0):
        assert all(request.key not in {each.key for each in sent} for request in more)
    assert not any(assignment.begins(1, key) for key in waiting)


def test_nothing_is_begun_after_the_last_needed_sample() -> None:
    assignment = Assignment(wanted(4, 2), Taken(2))
    shares = assignment.shares([0, 1])
    first, second = shares[0][0], shares[1][0]
    assert assignment.begins(0, first.key) and assignment.begins(1, second.key)
    assert assignment.take(0, sample_of(first)) and not assignment.is_over()
    assert not assignment.take(1, sample_of(second)) and assignment.is_over()
    assert not assignment.begins(0, shares[0][1].key) and assignment.overflow(0) == []


def test_late_requests_go_to_an_idle_replica_once_and_their_first_owner_s_answers_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    taken = Taken(16)
    shared = Assignment(wanted(8, 2), taken)
    shares = shared.shares([0, 1])
    for replica, share in shares.items():
        for request in share:
            assert shared.begins(replica, request.key)
    for second, request in enumerate(shares[0], start=1):
        now[0] = second
        assert shared.take(0, sample_of(request))
    assert len(shares[0]) >= assignment.SLOW_MIN_SAMPLES
    deadline = assignment.SLOW_FACTOR * (len(shares[0]) - 1)
    now[0] = deadline
    assert shared.reissue(0) == [], "not late yet"
    assert shared.reissue(1) == [], "its own are not sent to itself"
    now[0] = deadline + 0.1
    late = shared.reissue(0)
    assert [request.key for request in late] == [request.key for request in shares[1]]
    first = late[0]
    assert shared.take(1, sample_of(first)) and len(taken.keys) == len(shares[0]), "the first owner's answer is not taken"
    assert all(shared.begins(0, request.key) for request in late)
    now[0] = 100 * deadline
    shared._seconds[2] = [1.0] * assignment.SLOW_MIN_SAMPLES  # of a third replica
    assert shared.reissue(2) == [], "each moves once"
    for request in late:
        shared.take(0, sample_of(request))
    assert len(taken.keys) == len(set(taken.keys)) == 16 and shared.is_over()


def test_no_request_is_late_while_too_few_samples_of_others_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shared = Assignment(wanted(8, 2), Taken(16))
    shares = shared.shares([0, 1])
    for replica, share in shares.items():
        for request in share:
            shared.begins(replica, request.key)
    now[0] = 1.0
    for request in shares[0][: assignment.SLOW_MIN_SAMPLES - 1]:
        shared.take(0, sample_of(request))
    now[0] = 1000.0
    assert shared.reissue(0) == []
    shared.take(0, sample_of(shares[0][-1]))
    assert shared.reissue(0), "the last one needed"
