"""Have cases judged: answers that are known first, then requests for the missing ones, votes, scores, and the budget of the run.

A judge is called from the flow's process, as the engine is: it runs no code of a user's, and what was paid has one writer.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from infra.config import JudgeConfig
from infra.failures import RewardFailed
from infra.rewards.judges.answers import shown
from infra.rewards.judges.cases import NO_CHAT, Ask, Case, JudgeAnswer, JudgeAway, JudgeRequest, key_of
from infra.rewards.judges.ledger import Ledger
from infra.rewards.outcome import JUDGE_UNREADABLE, WHOLE_REWARD, Outcome, unjudged

CUT_OFF = "length"
SHOWN_END = 40
NOT_ASKED = JudgeAway("it was not asked")
OnOutcome = Callable[[int, Outcome], None]


class WorkName(NamedTuple):
    """What is judged, for the ledger."""

    run: str
    name: str
    """`step 3`, or `evaluation 3`: of that adapter version."""


TRIED: set[tuple[WorkName, str]] = set()
"""Requests of this process whose answers, beside a rollout, could not be read. The scoring after it does not pay for them again."""


class Vote(NamedTuple):
    key: str
    text: str
    scores: list[float] | None
    """None: the answer could not be read, or there is none."""
    reason: str
    message: str


class Judging:
    """Collects votes until each case has all of them."""

    def __init__(
        self,
        config: JudgeConfig,
        model: str,
        cases: Sequence[Case],
        ledger: Ledger,
        work: WorkName,
        on_outcome: OnOutcome,
        *,
        is_ahead: bool = False,
    ) -> None:
        """is_ahead: Whether the rollout still runs: then answers that cannot be read are kept for the scoring, which does not ask again."""
        self.config, self.model, self.ledger, self.work, self.on_outcome = config, model, ledger, work, on_outcome
        self.is_ahead = is_ahead
        self.cases: list[Case] = []
        self.places: list[tuple[int, int]] = []
        self.keys: list[str] = []
        self.votes: dict[tuple[int, int], Vote] = {}
        self.requests: list[JudgeRequest] = []
        """All that were sent, in their order."""
        self._under_way: dict[str, list[int]] = {}
        """Places of the requests without an answer, by key: equal samples are asked of once."""
        self._add(cases)

    def _add(self, cases: Sequence[Case]) -> None:
        config, first = self.config, len(self.cases)
        deciding = (config.temperature, config.max_output_tokens, config.answer)
        places = [(first + number, vote) for number in range(len(cases)) for vote in range(config.num_votes)]
        self.cases += cases
        self.places += places
        self.keys += [key_of(self.model, deciding, self.cases[number], vote) for number, vote in places]

    def run(self, ask: Ask | None, otherwise: JudgeAway = NOT_ASKED) -> None:
        """Judge all cases. A case whose recorded answer cannot be read is sent again, as any unjudged sample is.

        Without an Ask no request is sent: only recorded answers are used. otherwise: Why there are no others.

        Raises:
            RewardFailed: if the budget of the run is spent.
        """
        requests = self._missing(range(len(self.keys)), otherwise, sends=ask is not None)
        TRIED.difference_update((self.work, key) for key in self.keys)
        if ask is not None and requests:
            ask(requests, self.take)

    def more(self, cases: Sequence[Case]) -> list[JudgeRequest]:
        """Add cases. Return the requests that they need. Raises RewardFailed if the budget of the run is spent."""
        first = len(self.keys)
        self._add(cases)
        return self._missing(range(first, len(self.keys)), NOT_ASKED, sends=True)

    def _missing(self, numbers: range, otherwise: JudgeAway, *, sends: bool) -> list[JudgeRequest]:
        """Count the answers that are known. Return the requests for the others; none if nothing is sent."""
        known = self.ledger.found(dict.fromkeys(self.keys[number] for number in numbers))
        requests: list[JudgeRequest] = []
        for number in numbers:
            key, case = self.keys[number], self._case(number)
            vote = self._read(number, known.get(key, otherwise))
            if not sends or vote.scores is not None or (key in known and (self.work, key) in TRIED):
                self._count(number, vote)
                continue
            if key not in self._under_way:
                requests.append(JudgeRequest(case.messages, case.schema, key))
            self._under_way.setdefault(key, []).append(number)
        if requests:
            self._check_budget()
        self.requests += requests
        return requests

    def take(self, position: int, found: JudgeAnswer | JudgeAway) -> None:
        """Take what came of a request, by its position among all of them."""
        key = self.requests[position].key
        numbers = self._under_way.pop(key)
        if isinstance(found, JudgeAnswer):
            self.ledger.add(*self.work, key, found)
        votes = [self._read(number, found) for number in numbers]
        if self.is_ahead and isinstance(found, JudgeAnswer) and votes[0].scores is None:
            TRIED.add((self.work, key))
        for number, vote in zip(numbers, votes, strict=True):
            self._count(number, vote)
        if self._under_way:
            self._check_budget()

    def _case(self, number: int) -> Case:
        return self.cases[self.places[number][0]]

    def _read(self, number: int, found: JudgeAnswer | JudgeAway) -> Vote:
        key = self.keys[number]
        if isinstance(found, JudgeAway):
            return Vote(key, "", None, found.reason, f"its judge gave no answer: {found.message}")
        if found.finish_reason == NO_CHAT:
            return Vote(key, found.text, None, JUDGE_UNREADABLE, f"its judge's answer is {NO_CHAT}: {shown(found.text)}")
        try:
            scores = self._case(number).read(found.text)
            # A score that another digit would change may be the first digits of one: of 10 the 1.
            if (
                found.finish_reason == CUT_OFF
                and self.config.score_pattern
                and self._case(number).read(f"{found.text}0") != scores
            ):
                raise ValueError(f"its score may go on: {shown(found.text[-SHOWN_END:])}")
            return Vote(key, found.text, scores, "", "")
        except ValueError as error:
            cut = " (cut off at reward.judge.max_output_tokens)" if found.finish_reason == CUT_OFF else ""
            return Vote(key, found.text, None, JUDGE_UNREADABLE, f"its judge's answer{cut} cannot be read: {error}")

    def _count(self, number: int, vote: Vote) -> None:
        place = self.places[number]
        self.votes[place] = vote
        of_case = [self.votes.get((place[0], each)) for each in range(self.config.num_votes)]
        if all(of_case):
            for position, index in enumerate(self.cases[place[0]].indices):
                self.on_outcome(index, self._outcome([each for each in of_case if each], position))

    def _outcome(self, votes: Sequence[Vote], position: int) -> Outcome:
        scores = [vote.scores[position] for vote in votes if vote.scores is not None]
        if 2 * len(scores) <= len(votes):
            failed = next(vote for vote in votes if vote.scores is None)
            return unjudged(failed.reason, failed.message)
        score = fmean(scores) if self.config.vote_by == "mean" else median(scores)
        return Outcome(score, {WHOLE_REWARD: score})

    def _check_budget(self) -> None:
        config, spent = self.config, self.ledger.spent(self.work.run)
        cost = spent.cost(config.input_price, config.output_price)
        for field, limit, used in (
            ("max_run_tokens", config.max_run_tokens, spent.tokens),
            ("max_run_cost", config.max_run_cost, cost),
        ):
            if limit and used >= limit:
                raise RewardFailed(
                    f"the judge has taken {used:,.6g} in run {self.work.run!r}, and reward.judge.{field} is {limit:g}: raise it, then run the same "
                    "again; all judgements so far are kept"
                )

    def rows(self) -> list[dict[str, object]]:
        """Return the cases that were judged, for people: positions of their samples, and each vote."""
        found = []
        for number, case in enumerate(self.cases):
            votes = [self.votes[place] for vote in range(self.config.num_votes) if (place := (number, vote)) in self.votes]
            if votes:
                found.append({"indices": list(case.indices), "votes": [vote._asdict() for vote in votes]})
        return found
