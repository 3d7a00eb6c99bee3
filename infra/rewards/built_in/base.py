"""What a built-in reward says of a row besides its reward."""

from infra.rewards.signatures import Fields


class BuiltIn:
    """A subclass has __call__ with the parameters of a reward."""

    def check_row(self, answer: str, row: Fields) -> None:
        """Raise ValueError for a row by which no completion can be judged."""

    def own_completion(self, answer: str, row: Fields) -> str:
        """Return a row's own answer in the form in which a completion should give it."""
        return answer


def parameter(row: Fields, column: str, answer: str) -> tuple[object, str]:
    """Return the row's value of a column, or its answer where it has none, and what to call it in a message."""
    value = row.get(column)
    return (answer, "answer") if value is None else (value, f"column {column!r}")


def shown(value: object) -> str:
    return repr(value)[:100]
