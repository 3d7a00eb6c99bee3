import re
import time

import pytest

from infra.data.arithmetic import NAMES, TEMPLATES, THINGS, Split, problems, split_of

# What a question asks for, read from its words alone, so that a template with a wrong operator is found.
WORDS_OF_OPERATORS = {
    "+": r"gives \w+ \d+ more|in a box and|on Monday and|did they find together",
    "-": r"has \d+ \w+ and gives|A shop had|fewer",
    "*": r"boxes with|Each of",
    "++": r"then finds",
    "+-": r"then loses",
    "--": r"lost \d+ and sold",
    "*+": r"bags of .* finds",
    "*-": r"bags of .* gives",
}


def operators_of(question: str) -> str:
    (operators,) = [operators for operators, words in WORDS_OF_OPERATORS.items() if re.search(words, question)]
    return operators


def result_of(question: str) -> int:
    first, *others = re.findall(r"\d+", question)
    expression = first
    for operator, number in zip(operators_of(question), others, strict=True):
        expression = f"({expression}) {operator} {number}"
    return int(eval(expression))


def test_the_last_line_of_an_answer_is_what_the_question_asks_for() -> None:
    for row in problems("train", 3000) + problems("test", 1000):
        assert row["answer"].splitlines()[-1] == f"#### {result_of(row['question'])}", row


def test_every_line_of_a_worked_solution_is_a_true_equation_that_starts_where_the_last_one_ended() -> None:
    for row in problems("train", 3000):
        *equations, final = row["answer"].splitlines()
        assert len(equations) == len(operators_of(row["question"]))
        left, *rest = re.findall(r"\d+", row["question"])
        for equation, operator, right in zip(equations, operators_of(row["question"]), rest, strict=True):
            assert equation.startswith(f"{left} {operator} {right} = ")
            left = equation.rpartition(" ")[2]
            assert eval(equation.partition("=")[0]) == int(left) > 0
        assert final == f"#### {left}"


def test_every_template_is_drawn_in_both_splits() -> None:
    filled_in = re.compile("|".join([r"\d+", *(rf"\b{word}\b" for word in NAMES + THINGS)]))
    expected = {re.sub(r"{\w+}", "_", template.question) for template in TEMPLATES}
    splits: list[Split] = ["train", "test"]
    for split in splits:
        assert {filled_in.sub("_", row["question"]) for row in problems(split, 2000)} == expected


def test_no_question_is_in_both_splits_whatever_the_seeds() -> None:
    train = {row["question"] for seed in range(3) for row in problems("train", 5000, seed=seed)}
    test = {row["question"] for seed in range(3) for row in problems("test", 5000, seed=seed)}
    assert not train & test
    assert {split_of(question) for question in train} == {"train"}


def test_no_question_occurs_twice_in_a_split() -> None:
    questions = [row["question"] for row in problems("train", 50000)]
    assert len(set(questions)) == len(questions) == 50000


def test_the_same_seed_gives_the_same_rows_and_more_of_them_only_append() -> None:
    assert problems("test", 300, seed=7) == problems("test", 500, seed=7)[:300]


def test_another_seed_gives_other_rows() -> None:
    assert problems("train", 100, seed=1) != problems("train", 100, seed=2)


def test_rows_never_change_between_versions() -> None:
    """Runs are reproduced from the seed alone, so these may change only on purpose."""
    (row,) = problems("train", 1)
    assert row == {
        "question": "Omar has 5 bags of 2 roses and gives 6 to Olga. How many roses does Omar have left?",
        "answer": "5 * 2 = 10\n10 - 6 = 4\n#### 4",
    }


def test_twenty_thousand_rows_take_a_second_or_so() -> None:
    start = time.process_time()
    problems("train", 20000)
    assert time.process_time() - start < 3


def test_an_unknown_split_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="'validation'"):
        problems("validation", 1)  # type: ignore[arg-type]  # that is the point
