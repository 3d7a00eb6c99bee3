"""Call a reward with samples: one after the other, as a batch, or many at once where it is async."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

from infra.rewards.loading import LoadedReward
from infra.rewards.outcome import NO_NUMBER, TIME_OUT, Outcome, of_error, of_value, unjudged
from infra.rewards.signatures import Fields, arguments_of_batch, arguments_of_sample, value_of


class Caller:
    """Calls one reward."""

    def __init__(self, loaded: LoadedReward, weights: Mapping[str, float], concurrency: int, timeout_s: float) -> None:
        self.function, self.form = loaded
        self.weights, self.concurrency, self.timeout_s = weights, concurrency, timeout_s

    def outcomes(self, samples: Sequence[Fields]) -> Iterator[tuple[int, Outcome]]:
        """Yield the outcome of each sample with its position, as it comes."""
        if self.form.is_batch:
            yield from self._as_batch(samples)
        elif self.form.is_async:
            yield from self._many_at_once(samples)
        else:
            for position, sample in enumerate(samples):
                yield position, self._of(sample)

    def _of(self, sample: Fields) -> Outcome:
        try:
            value = self.function(**arguments_of_sample(self.form, sample))
            value = asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value
        except BaseException as error:  # noqa: BLE001  # a user's code may raise anything, also SystemExit and KeyboardInterrupt
            return of_error(error)
        return self._outcome(value)

    def _outcome(self, value: object) -> Outcome:
        try:
            return of_value(value_of(self.form, value), self.weights, self.function)
        except BaseException as error:  # noqa: BLE001  # a value of a user's own class may raise in every method
            return of_error(error)

    def _as_batch(self, samples: Sequence[Fields]) -> Iterator[tuple[int, Outcome]]:
        """Call with all samples. If that fails, call with each alone, so that a sample costs no other one."""
        try:
            value = self.function(**arguments_of_batch(self.form, samples))
            values = _as_list(asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)
        except BaseException as error:  # noqa: BLE001  # as above
            if len(samples) == 1:
                yield 0, of_error(error)
                return
            for position, sample in enumerate(samples):
                yield from ((position, outcome) for _, outcome in self._as_batch([sample]))
            return
        if values is None or len(values) != len(samples):
            what = f"{len(values)} values" if values is not None else f"a {type(value).__name__}"
            wrong = unjudged(NO_NUMBER, f"returned {what} for {len(samples)} samples: a list with a number for each is needed")
            yield from ((position, wrong) for position in range(len(samples)))
            return
        yield from ((position, self._outcome(each)) for position, each in enumerate(values))

    def _many_at_once(self, samples: Sequence[Fields]) -> Iterator[tuple[int, Outcome]]:
        loop = asyncio.new_event_loop()
        try:
            semaphore = asyncio.Semaphore(self.concurrency)
            tasks = {loop.create_task(self._awaited_of(sample, semaphore)): n for n, sample in enumerate(samples)}
            pending = set(tasks)
            while pending:
                done, pending = loop.run_until_complete(asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED))
                yield from ((tasks[task], task.result()) for task in done)
        finally:
            loop.close()

    async def _awaited_of(self, sample: Fields, semaphore: asyncio.Semaphore) -> Outcome:
        async with semaphore:
            limit = asyncio.timeout(self.timeout_s)
            try:
                async with limit:
                    value = await self.function(**arguments_of_sample(self.form, sample))
            except BaseException as error:  # noqa: BLE001  # as above
                return unjudged(TIME_OUT, f"gave no result in {self.timeout_s:g} s") if limit.expired() else of_error(error)
            return self._outcome(value)


async def _awaited(value: Awaitable[Any]) -> Any:  # Any: what a user's function returns
    return await value


def _as_list(value: object) -> list[object] | None:
    to_list: Callable[[], Any] | None = getattr(value, "tolist", None)
    found = to_list() if to_list and isinstance(value, Sized) else value
    return list(found) if isinstance(found, list | tuple) else None
