"""Early stop: which groups of a rollout's episodes are complete, and whether they are enough."""

from collections.abc import Iterable, Sequence


class Enough(Exception):
    """All groups that are needed are complete."""


class WholeGroups:
    """The groups whose episodes have all finished, the first ones up to the number that is needed."""

    def __init__(self, prompt_ids: Sequence[int], group_size: int, num: int, finished: Iterable[tuple[int, int]]) -> None:
        """num: Groups that are needed. finished: Prompt id and sample index of the episodes that have finished, in the order in which they did."""
        self.num = num
        self.num_left = dict.fromkeys(prompt_ids, group_size)
        self.prompt_ids: list[int] = []
        for key in finished:
            self.add(key)

    def add(self, key: tuple[int, int]) -> None:
        """Note that an episode has finished."""
        self.num_left[key[0]] -= 1
        if not self.num_left[key[0]] and not self.are_enough:
            self.prompt_ids.append(key[0])

    @property
    def are_enough(self) -> bool:
        return len(self.prompt_ids) >= self.num
