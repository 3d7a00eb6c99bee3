"""Every class of failure, with its cure. Errors that we raise stand on top, the table under them; who retries asks `verdict`.

What is in no class is not retried: an unknown error is not made better by doing the same again.
docs/failures.md shows the table; a test keeps the two equal.
"""

import errno
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from infra.store.files import DigestMismatch


class EngineUnavailable(RuntimeError):
    """The engine does not answer (any more): it may be started again."""

    def __init__(self, message: str, traceback: str = "") -> None:
        """traceback: the last one of the engine's log; it becomes part of the message."""
        is_said = not traceback or traceback.splitlines()[-1] in message
        super().__init__(message if is_said else f"{message}\nthe last traceback of the engine's log:\n{traceback}")
        self.traceback = traceback


class NodeLost(EngineUnavailable):
    """A node of the cluster is gone, and with it the engine servers that it had."""


class NoNodeForEngine(EngineUnavailable):
    """The living nodes have no room for an engine server; those of this run only become fewer. The message is one line that says all."""


class EngineCrashedAgain(EngineUnavailable):
    """The engine died of the same error on the same request as the one before it: another one would die of it too."""


class EngineOutOfMemory(EngineUnavailable):
    """The engine ran out of memory while it was launched or woken."""


class EngineRefused(RuntimeError):
    """The engine rejects a request as invalid; a retry will not help."""


class WrongAnswer(RuntimeError):
    """The engine answered, and the answer cannot be right: nothing made from it may be used."""

    def __init__(self, message: str, evidence: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.evidence = evidence
        """The request and the response, as JSON; saved in the step's folder."""


class RewardFailed(ValueError):
    """A reward could not judge more samples than may be left out. The message is one line that says all; a traceback adds nothing."""


class NoNodesForRanks(ValueError):
    """The trainer's ranks do not fit on the nodes that are left. The message is one line that says all."""


class StoreRefused(ValueError):
    """The store at RATCHET_STORE_URL does not take these keys, there is none, or it has the run of another machine. The message is one line
    that says all."""


class TrainerLost(RuntimeError):
    """The trainer was killed or never came up: the same job may be tried again."""


class TrainerNodeLost(TrainerLost):
    """A node of the cluster is gone, and with it some of the trainer's ranks."""


class TrainerOutOfMemory(RuntimeError):
    """The trainer ran out of memory; smaller micro-batches may fit."""


class TrainingFailed(RuntimeError):
    """Bad data, numbers that are not finite, or samples that another model gave: nothing was made, and trying again will not help."""


class EvaluationLost(RuntimeError):
    """The program that runs a task of inspect-ai was killed, or was not done in time: the same may be tried again."""


class MemoryLeak(RuntimeError):
    """A process of ours holds more and more memory; it was ended, and the step is committed."""


class Failure(NamedTuple):
    """A class of failure."""

    name: str
    signs: str
    """How it shows, for people."""
    is_it: Callable[[BaseException], bool]
    cure: str
    num_attempts: int = 1
    """Of a task, the first one included; 1 is no retry."""
    deadline_s: float = 0.0
    """No attempt is begun later than this after the task's first failure. Counted from there, because a long rollout or
    training before it was work, not trouble."""


BACKOFF_S = (2.0, 10.0, 30.0)
"""Before the second attempt, the third and so on. One ladder for all classes, without jitter: one machine retries, not a crowd."""


def _is(*types: type[BaseException]) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, types)


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the system's errors: no space, over the quota, over the largest size of a file."""


def is_disk_full(error: BaseException) -> bool:
    """Whether the system had no room for what was written."""
    return isinstance(error, OSError) and error.errno in DISK_FULL


FAILURES = (  # the first that fits counts: a special class stands above the general one
    Failure(
        "engine out of memory",
        "the engine cannot be launched or woken, and its log says out of memory",
        _is(EngineOutOfMemory),
        "end the engine, wait until the GPU's memory is free, start another, check it, load the adapter, go on with the missing samples",
        num_attempts=4,
        deadline_s=1800,
    ),
    Failure(
        "engine crashed again",
        "an engine dies on the same request with the same traceback in its log as the engine before it",
        _is(EngineCrashedAgain),
        "stop; the message holds the traceback",
    ),
    Failure(
        "no node for the engine",
        "the nodes that are left have too few GPUs for an engine server, or are fewer than it is spread over",
        _is(NoNodeForEngine),
        "stop; run the same again when there are nodes enough: it uses those that live then, and samples are kept",
    ),
    Failure(
        "node lost",
        "Ray reports a node dead, or the agent of a run on it",
        _is(NodeLost, TrainerNodeLost),
        "go on with the nodes that are left: their engine servers finish the rollout and more are started there; the same training job again, with "
        "its ranks on them; stop if they have too few GPUs",
        num_attempts=4,
        deadline_s=1800,
    ),
    Failure(
        "engine unavailable",
        "connection refused or reset, no answer in time, HTTP 5xx, process gone",
        _is(EngineUnavailable),
        "end the engine, start another, check it, load the adapter, go on with the missing samples",
        num_attempts=4,
        deadline_s=1800,
    ),
    Failure(
        "trainer lost",
        "trainer killed, hung past trainer.timeout_s, or ended without a result",
        _is(TrainerLost),
        "end what is left of it, the same job again",
        num_attempts=3,
        deadline_s=5400,
    ),
    Failure(
        "evaluation lost",
        "the program of an inspect task killed, or not done after evaluation.inspect_timeout_s",
        _is(EvaluationLost),
        "end what is left of it, the same task again: answers that it had are given back",
        num_attempts=3,
        deadline_s=5400,
    ),
    Failure(
        "trainer out of memory",
        "out of memory in the trainer's log",
        _is(TrainerOutOfMemory),
        "the same job with micro-batches of half the size, down to the longest sequence: the result is the same; then stop",
    ),
    Failure(
        "training failed",
        "the trainer ended with an error of its own: bad data, numbers that are not finite, or samples that another model gave",
        _is(TrainingFailed),
        "stop; its log and its job are kept",
    ),
    Failure(
        "request refused",
        "HTTP 4xx",
        _is(EngineRefused),
        "stop; the message holds the engine's words",
    ),
    Failure(
        "wrong answer",
        "NaN, positive log-probability, token out of the vocabulary, missing or foreign sample, golden check or canary off",
        _is(WrongAnswer),
        "stop, end the engine, set the partial rollout aside; the answer is kept in the step's folder evidence/",
    ),
    Failure(
        "memory leak",
        "a process holds over 1% more GPU memory than ten steps before, in the same phase",
        _is(MemoryLeak),
        "stop; the step is committed and the process that the message names was ended: run the same again",
    ),
    Failure(
        "file changed",
        "a file's digest is not the recorded one",
        _is(DigestMismatch),
        "stop; restore the file, or drop the steps from that one on: ratchet drop RUN --from STEP",
    ),
    Failure(
        "disk full",
        "no space left on the device, quota exceeded, or file too large",
        is_disk_full,
        "stop; make room or raise the limit (ulimit -f), then run the same again: committed steps are whole",
    ),
    Failure(
        "reward failed",
        "more samples than reward.max_unjudged_frac allows could not be judged: the reward raised an error, gave no result in time, ended its "
        "process, or returned no finite number; or the model that judges gave no answer or none that can be read, or its budget is spent",
        _is(RewardFailed),
        "stop; correct the reward or its judge at the place that the message names, then run the same again: samples are kept, and so are scores "
        "while the reward's source is the same",
    ),
    Failure(
        "bad input",
        "a configuration, prompt or batch that cannot be used",
        _is(ValueError, ValidationError),
        "stop; correct the value that the message names",
    ),
)
UNKNOWN = Failure("not classified", "anything else", lambda error: True, "stop; an error that is in no class is not retried")

MAX_RETRIES = max(failure.num_attempts for failure in FAILURES)
"""One more than any class allows, so that the table, not this number, has the last word."""


def classify(error: BaseException) -> Failure:
    """Return the class of an error: the first of the table that it is in, else UNKNOWN."""
    return next((failure for failure in FAILURES if failure.is_it(error)), UNKNOWN)


class Verdict(NamedTuple):
    is_retried: bool
    text: str
    """Class, cure, attempts and deadline, for people."""


def verdict(error: BaseException, *, num_attempts: int, trouble_s: float) -> Verdict:
    """What is done about an error.

    num_attempts: made so far by this task, the one that failed just now included.
    trouble_s: seconds since the task's first failure.
    """
    failure = classify(error)
    used = f"failure class: {failure.name}; cure: {failure.cure}"
    if failure.num_attempts == 1:  # the attempts before it failed otherwise
        return Verdict(False, f"{used}; this class is not retried")
    wait_s = backoff_s(num_attempts)
    used += f"; attempt {num_attempts} of {failure.num_attempts}, {trouble_s:.0f} s since the first failure, deadline {failure.deadline_s:g} s"
    if num_attempts >= failure.num_attempts:
        return Verdict(False, f"{used}: no attempt is left")
    if trouble_s + wait_s > failure.deadline_s:
        return Verdict(False, f"{used}: no time is left")
    return Verdict(True, f"{used}: the next one in {wait_s:g} s")


def backoff_s(num_attempts: int) -> float:
    """Seconds to wait after the last of num_attempts failed attempts."""
    return BACKOFF_S[min(num_attempts, len(BACKOFF_S)) - 1]


def table() -> str:
    """The Markdown table of docs/failures.md."""
    rows = [
        f"| {f.name} | {f.signs} | {f.cure} | {f.num_attempts} | {_waits(f)} | {_seconds(f.deadline_s)} |"
        for f in (*FAILURES, UNKNOWN)
    ]
    head = "| class | how it shows | cure | attempts | waits between | deadline |\n| --- | --- | --- | --- | --- | --- |"
    return "\n".join([head, *rows]) + "\n"


def _waits(failure: Failure) -> str:
    return ", ".join(f"{backoff_s(n):g} s" for n in range(1, failure.num_attempts)) or "-"


def _seconds(value: float) -> str:
    return f"{value:g} s" if value else "-"
