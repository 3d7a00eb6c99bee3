"""Have cases judged: answers that are known first, then requests for the missing ones, votes, scores, and the budget of the run.

A judge is called from the flow's process, as the engine is: it runs no code of a user's, and what was paid has one writer.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from infra.config import JudgeConfig
from infra.failures import RewardFailed
from infra.rewards.judges.answers import shown
from infra.rewards.judges.cases import NO_CHAT, Ask, Case, JudgeAnswer, JudgeAway, JudgeRequest, key_of
from infra.rewards.judges.ledger import Ledger
from infra.rewards.outcome import JUDGE_UNREADABLE, WHOLE_REWARD, Outcome, unjudged

CUT_OFF = "length"
NOT_ASKED = JudgeAway("it was not asked")
OnOutcome = Callable[[int, Outcome], None]


class WorkName(NamedTuple):
    """What is judged, for the ledger."""

    run: str
    name: str
    """`step 3`, or `evaluation 3`: of that adapter version."""


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
        self, config: JudgeConfig, model: str, cases: Sequence[Case], ledger: Ledger, work: WorkName, on_outcome: OnOutcome
    ) -> None:
        self.config, self.cases, self.ledger, self.work, self.on_outcome = config, cases, ledger, work, on_outcome
        deciding = (config.temperature, config.max_output_tokens, config.answer)
        self.places = [(number, vote) for number in range(len(cases)) for vote in range(config.num_votes)]
        self.keys = [key_of(model, deciding, cases[number], vote) for number, vote in self.places]
        self.votes: dict[tuple[int, int], Vote] = {}

    def run(self, ask: Ask | None, otherwise: JudgeAway = NOT_ASKED) -> None:
        """Judge all cases. A case whose recorded answer cannot be read is sent again, as any unjudged sample is.

        Without an Ask no request is sent: only recorded answers are used. otherwise: Why there are no others.

        Raises:
            RewardFailed: if the budget of the run is spent.
        """
        known = self.ledger.found(dict.fromkeys(self.keys))
        missing: list[int] = []
        for number, key in enumerate(self.keys):
            vote = self._read(number, known.get(key, otherwise))
            if ask is None or vote.scores is not None:
                self._count(number, vote)
            else:
                missing.append(number)
        by_key: dict[str, list[int]] = {}  # equal samples are asked of once
        for number in missing:
            by_key.setdefault(self.keys[number], []).append(number)
        if ask is not None and by_key:
            self._check_budget()
            self._ask(ask, by_key)

    def _ask(self, ask: Ask, by_key: Mapping[str, Sequence[int]]) -> None:
        left = len(by_key)
        cases = {key: self._case(numbers[0]) for key, numbers in by_key.items()}
        requests = [JudgeRequest(case.messages, case.schema, key) for key, case in cases.items()]

        def take(position: int, found: JudgeAnswer | JudgeAway) -> None:
            nonlocal left
            left -= 1
            key = requests[position].key
            if isinstance(found, JudgeAnswer):
                self.ledger.add(*self.work, key, found)
            for number in by_key[key]:
                self._count(number, self._read(number, found))
            if left:
                self._check_budget()

        ask(requests, take)

    def _case(self, number: int) -> Case:
        return self.cases[self.places[number][0]]

    def _read(self, number: int, found: JudgeAnswer | JudgeAway) -> Vote:
        key = self.keys[number]
        if isinstance(found, JudgeAway):
            return Vote(key, "", None, found.reason, f"its judge gave no answer: {found.message}")
        if found.finish_reason == NO_CHAT:
            return Vote(key, found.text, None, JUDGE_UNREADABLE, f"its judge's answer is {NO_CHAT}: {shown(found.text)}")
        try:
            return Vote(key, found.text, self._case(number).read(found.text), "", "")
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
