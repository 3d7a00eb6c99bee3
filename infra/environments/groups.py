"""Early stop: which groups of a rollout's episodes are complete, and whether they are enough."""

from collections.abc import Collection, Iterable, Sequence


class Enough(Exception):
    """All groups that are needed are complete."""


class WholeGroups:
    """The groups whose episodes have all finished: the required ones, and the first others up to the number that is needed."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        group_size: int,
        num: int,
        finished: Iterable[tuple[int, int]],
        must_be_whole: Collection[int] = (),
    ) -> None:
        """num: Groups that are needed. finished: Prompt id and sample index of the episodes that have finished, in the order in which they did.
        must_be_whole: Prompts of the groups without which they are not enough: those that the step before carried over."""
        self.num, self.must_be_whole = num, frozenset(must_be_whole)
        self.num_left = dict.fromkeys(prompt_ids, group_size)
        self.prompt_ids: list[int] = []
        for key in finished:
            self.add(key)

    def add(self, key: tuple[int, int]) -> None:
        """Note that an episode has finished."""
        self.num_left[key[0]] -= 1
        if not self.num_left[key[0]] and self._has_room(key[0]):
            self.prompt_ids.append(key[0])

    def _has_room(self, prompt_id: int) -> bool:
        num_others = len(set(self.prompt_ids) - self.must_be_whole)
        return prompt_id in self.must_be_whole or num_others < self.num - len(self.must_be_whole)

    @property
    def are_enough(self) -> bool:
        return len(self.prompt_ids) >= self.num
