"""Arithmetic word problems, generated: a data set that needs no network and has a known right answer for every row.

Rows look like GSM8K's, a question and a worked solution that ends in `#### 42`, so that the same reward reads both.
"""

import hashlib
import random
from collections.abc import Iterator
from typing import Literal, NamedTuple

Split = Literal["train", "test"]

NAMES = (
    *("Ada", "Ali", "Amy", "Anna", "Ben", "Bob", "Carl", "Cleo", "Dan", "Dora", "Emma", "Eric", "Eva", "Finn", "Grace", "Hugo"),
    *("Ida", "Ivan", "Jack", "June", "Kai", "Kim", "Lena", "Leo", "Lily", "Luis", "Mary", "Max", "Mia", "Nina", "Noah", "Olga"),
    *("Omar", "Paul", "Pia", "Rosa", "Ruth", "Sam", "Sara", "Sue", "Ted", "Tess", "Tom", "Uma", "Vera", "Will", "Yara", "Zoe"),
)
THINGS = (
    *("apples", "balls", "beads", "books", "buttons", "cakes", "candles", "cards", "coins", "cookies", "cups", "eggs", "flowers"),
    *("hats", "keys", "kites", "lemons", "letters", "marbles", "nuts", "pears", "pencils", "pens", "pins", "plums", "roses"),
    *("shells", "stamps", "stars", "stones", "tickets", "toys"),
)


class Template(NamedTuple):
    operators: str
    """Applied from left to right to the numbers in the order in which the question names them."""
    question: str


TEMPLATES = (
    Template("+", "{name} has {a} {things}. {friend} gives {name} {b} more. How many {things} does {name} have now?"),
    Template("+", "There are {a} {things} in a box and {b} on the table. How many {things} are there in total?"),
    Template("+", "{name} bought {a} {things} on Monday and {b} on Tuesday. How many {things} did {name} buy in total?"),
    Template("+", "{name} found {a} {things} and {friend} found {b}. How many {things} did they find together?"),
    Template("-", "{name} has {a} {things} and gives {b} to {friend}. How many {things} does {name} have left?"),
    Template("-", "A shop had {a} {things} and sold {b} of them. How many {things} are left?"),
    Template("-", "{name} has {a} {things}. {friend} has {b} fewer. How many {things} does {friend} have?"),
    Template("*", "{name} has {a} boxes with {b} {things} in each. How many {things} does {name} have?"),
    Template("*", "Each of {a} friends brings {b} {things}. How many {things} do they bring together?"),
    Template("++", "{name} has {a} {things}, buys {b} and then finds {c} more. How many {things} does {name} have now?"),
    Template("+-", "{name} has {a} {things}, buys {b} and then loses {c}. How many {things} does {name} have left?"),
    Template("--", "{name} had {a} {things}, lost {b} and sold {c}. How many {things} does {name} have left?"),
    Template("*+", "{name} has {a} bags of {b} {things} and finds {c} more. How many {things} does {name} have now?"),
    Template("*-", "{name} has {a} bags of {b} {things} and gives {c} to {friend}. How many {things} does {name} have left?"),
)

# The largest number in a sum, by level; three levels in equal parts make a spread from facts that can be learnt by heart to
# sums that need a carry, so that a weak model solves some problems and not others.
LARGEST_TERM = (9, 14, 20)
# Factors stay in the small multiplication table.
LARGEST_FACTOR = (5, 7, 9)


def problems(split: Split, num: int, seed: int = 0) -> list[dict[str, str]]:
    """The first num problems of a split: rows of `question` and `answer`, none of them twice. Raises ValueError for another split.

    A question's own SHA-256 decides its split, for every seed, so no question is ever in both. The same seed gives
    the same rows, and a larger num only appends to them.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split is train or test, not {split!r}")
    rows: dict[str, str] = {}
    drawn = _draw_for_ever(random.Random(seed))
    while len(rows) < num:
        question, answer = next(drawn)
        if split_of(question) == split:
            rows.setdefault(question, answer)
    return [{"question": question, "answer": answer} for question, answer in rows.items()]


def split_of(question: str) -> Split:
    """One question in four is a test question."""
    return "test" if hashlib.sha256(question.encode()).digest()[0] < 64 else "train"


def _draw_for_ever(rng: random.Random) -> Iterator[tuple[str, str]]:
    while True:
        template = rng.choice(TEMPLATES)
        numbers = _draw_numbers(rng, template.operators)
        name, friend = rng.sample(NAMES, 2)
        letters = dict(zip("abc", numbers, strict=False))
        question = template.question.format(name=name, friend=friend, things=rng.choice(THINGS), **letters)
        yield question, _solve(numbers, template.operators)


def _draw_numbers(rng: random.Random, operators: str) -> list[int]:
    """Numbers of a random level that keep every intermediate result at 1 or more."""
    level = rng.randrange(len(LARGEST_TERM))
    while True:
        largest = LARGEST_FACTOR[level] if operators[0] == "*" else LARGEST_TERM[level]
        numbers = [rng.randint(2, largest)]
        numbers += [rng.randint(2, (LARGEST_FACTOR if sign == "*" else LARGEST_TERM)[level]) for sign in operators]
        if min(result for *_, result in _steps(numbers, operators)) >= 1:
            return numbers


def _steps(numbers: list[int], operators: str) -> Iterator[tuple[int, str, int, int]]:
    """Left, operator, right and result of each step."""
    left = numbers[0]
    for operator, right in zip(operators, numbers[1:], strict=True):
        result = {"+": left + right, "-": left - right, "*": left * right}[operator]
        yield left, operator, right, result
        left = result


def _solve(numbers: list[int], operators: str) -> str:
    """The worked solution, one step a line, in GSM8K's form."""
    steps = list(_steps(numbers, operators))
    lines = [f"{left} {operator} {right} = {result}" for left, operator, right, result in steps]
    return "\n".join([*lines, f"#### {steps[-1][-1]}"])
