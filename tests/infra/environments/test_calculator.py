"""The calculator example: what it answers, and what it rewards."""

from tool_journal import recorded

from infra.environments.examples.calculator import ASK_AGAIN, Calculator
from infra.environments.examples.calculator_tool import CalculatorTool

TASK = {"question": "Bob has 5 bags of 6 plums and gives 16 to Sara. How many?", "answer": "5 * 6 = 30\n30 - 16 = 14\n#### 14"}


def begun() -> Calculator:
    game = Calculator()
    assert game.reset(TASK) == TASK["question"]
    return game


def test_a_wrong_result_is_corrected_and_the_right_answer_after_it_is_rewarded() -> None:
    game = begun()
    assert game.step("5 * 6 = 31\n31 - 16 = 15\n#### 15") == (f"5 * 6 = 30\n{TASK['question']}", 0.0, False)
    assert game.step("5 * 6 = 30\n30 - 16 = 14\n#### 14") == ("", 1.0, True)


def test_an_answer_without_a_calculation_is_not_accepted() -> None:
    game = begun()
    assert game.step("#### 14") == (f"{ASK_AGAIN}\n{TASK['question']}", 0.0, False)
    assert game.step("5 * 6") == (f"{ASK_AGAIN}\n{TASK['question']}", 0.0, False)


def test_right_calculations_with_another_answer_or_none_end_without_a_reward() -> None:
    assert begun().step("5 * 6 = 30\n30 - 16 = 14\n#### 15") == ("", 0.0, True)
    assert begun().step("5 + 6 = 11\n#### 11") == ("", 0.0, True)
    assert begun().step("5 * 6 = 30") == ("", 0.0, True)


def test_the_calculator_as_a_tool_says_the_same_with_each_call_on_record() -> None:
    for action in (
        "#### 14",
        "5 * 6 = 30 / 30 - 16 = 13",
        "5 * 6 = 30 / 30 - 16 = 14 / #### 14",
        "3 - 9 = -6 #### 1",
        "7 + 7 = 15",
    ):
        plain, with_tool = Calculator(), CalculatorTool()
        assert plain.reset(TASK) == with_tool.reset(TASK)
        with recorded() as journal:
            assert plain.step(action) == with_tool.step(action)
        assert len(journal.results) == action.count("=")
        assert not any(is_error for _, is_error in journal.results)
