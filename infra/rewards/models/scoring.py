"""Have a reward model score conversations: in batches, each with a deadline; a program that is lost costs no score that can be had.

lost while it loads     started again
lost with a batch       the same batch again, then its rows alone; a row that is lost alone is unjudged
lost MAX_LOST times     the step stops, and names the log
"""

import logging
from collections import deque
from collections.abc import Callable, Container, Sequence

from infra.concurrency.deadline import Deadline
from infra.config import RewardConfig
from infra.failures import RewardFailed
from infra.rewards.models import scorer
from infra.rewards.models.batches import batches_of
from infra.rewards.models.protocol import Score
from infra.rewards.models.scorer import ScorerLost
from infra.rewards.outcome import TIME_OUT, TOO_LONG, WHOLE_REWARD, Outcome, unjudged

log = logging.getLogger(__name__)

MAX_LOST = 6
OnOutcome = Callable[[int, Outcome], None]


def judge(
    config: RewardConfig, rows: Sequence[Sequence[int]], known: Container[int], on_outcome: OnOutcome, deadline: Deadline
) -> None:
    """Have rows of token ids scored.

    known: Positions of rows whose scores an earlier attempt left. They are scored again only where another row of their batch is missing.
    on_outcome: Gets the outcome of each missing row as it comes; its errors are raised.
    deadline: When it is over, what has no score is unjudged. A batch that is under way then is lost, and its program with it.

    Raises:
        RewardFailed: for a model that cannot be loaded, and if its program is lost again and again.
    """
    longest = config.model.max_tokens
    fitting = [position for position, row in enumerate(rows) if 0 < len(row) <= longest]
    for position in sorted(set(range(len(rows))) - set(fitting)):
        what = f"its conversation has {len(rows[position])} tokens, and reward.model.max_tokens is {longest}"
        on_outcome(position, unjudged(TOO_LONG, what))
    batches = batches_of([len(rows[position]) for position in fitting], config.model.max_tokens_per_batch)
    whole = [[fitting[place] for place in batch] for batch in batches]
    missing = [batch for batch in whole if any(position not in known for position in batch)]

    def take(position: int, outcome: Outcome) -> None:
        if position not in known:
            on_outcome(position, outcome)

    try:
        _Scoring(config, rows, missing, take, deadline).run()
    finally:
        scorer.sleep(config.model)


class _Scoring:
    """The batches that are left, and what became of the program."""

    def __init__(
        self,
        config: RewardConfig,
        rows: Sequence[Sequence[int]],
        batches: Sequence[list[int]],
        take: OnOutcome,
        deadline: Deadline,
    ) -> None:
        self.config, self.rows, self.take, self.deadline = config, rows, take, deadline
        self.waiting = deque((batch, False) for batch in batches)
        """Positions, and whether the program was lost with them before."""
        self.num_lost = 0

    def run(self) -> None:
        program: scorer.ScorerProgram | None = None
        while self.waiting and not self.deadline.is_over:
            try:
                if program is None or not program.is_open:
                    program = scorer.opened(self.config, self.deadline)
            except ScorerLost as error:
                self._count(error)
                continue
            batch, is_second = self.waiting.popleft()
            try:
                found = program.ask([self.rows[position] for position in batch], self.deadline.at_most(self.config.timeout_s))
            except ScorerLost as error:
                self._try_again(batch, error, is_second=is_second)
                self._count(error)
                continue
            for position, score in zip(batch, found, strict=True):
                self.take(position, _outcome(score))
        for batch, _ in self.waiting:
            for position in batch:
                self.take(position, unjudged(TIME_OUT, "had no score when reward.task_timeout_s was over"))

    def _try_again(self, batch: list[int], error: ScorerLost, *, is_second: bool) -> None:
        if not is_second or self.deadline.is_over:
            self.waiting.appendleft((batch, True))
        elif len(batch) > 1:
            self.waiting.extendleft(([position], True) for position in reversed(batch))
        else:
            self.take(batch[0], unjudged(error.reason, str(error)))

    def _count(self, error: ScorerLost) -> None:
        if self.deadline.is_over:
            return
        self.num_lost += 1
        log.warning("%s (%d of at most %d times)", error, self.num_lost, MAX_LOST)
        if self.num_lost >= MAX_LOST:
            raise RewardFailed(
                f"reward model {self.config.model.path!r}: {error}, {self.num_lost} times{scorer.last_words()}"
            ) from error


def _outcome(score: Score) -> Outcome:
    value, reason, message = score
    return unjudged(reason, message) if value is None else Outcome(value, {WHOLE_REWARD: value})
