"""Built-in rewards that a worker calls: each by the vectors of its source, and what it says of a row that is wrong."""

import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from infra.config import RewardConfig
from infra.data.dataset import Row
from infra.data.prompts import Prompt
from infra.failures import RewardFailed
from infra.rewards import client
from infra.rewards.built_in.python_tests import WAIT_FACTOR
from infra.rewards.built_in.shape import OverlongPenalty
from infra.store.layout import Workspace
from infra.store.samples import Sample
from tasks.rewards.apply import judged
from tasks.rewards.own_answers import check_own_answers, rewards_of_own_answers


@pytest.fixture(autouse=True)
def _ends_pools(workspace: Path) -> Iterator[None]:
    yield
    client.close_all()


def rewards_of(name: str, *cases: tuple[str, str, dict[str, Any]], **fields: Any) -> list[float | None]:
    """What workers give: each case is a completion, the answer and the row's columns."""
    samples = [Sample(n, 0, [1], [2], [-0.1], "stop", 0, "", completion) for n, (completion, _, _) in enumerate(cases)]
    prompts = [Prompt(n, n, "?", answer, [1], 0, row) for n, (_, answer, row) in enumerate(cases)]
    config = RewardConfig(**{"name": name, "workers": 1, "max_unjudged_frac": 0.0, **fields})
    journal = Workspace.here().logs / "scores.jsonl"
    journal.unlink(missing_ok=True)
    return [sample.reward for sample in judged(config, samples, prompts, journal, {"samples": "x", "prompts": "x"})]


def test_exact_match_is_the_whole_completion_without_the_blanks_around_it() -> None:
    cases = [("Paris", 1), (" Paris\n", 1), ("paris", 0), ("It is Paris", 0), ("Paris.", 0), ("", 0), ("Pa ris", 0)]
    assert rewards_of("exact_match", *[(completion, "Paris ", {}) for completion, _ in cases]) == [right for _, right in cases]


INTEGERS = [
    # answer, completion, reward
    ("033", r"so \boxed{33}", 1),
    ("33", r"\boxed{033}", 1),
    ("204", r"\boxed{1}, no: \boxed{204}", 1),
    ("1,000", r"\boxed{1000}", 1),
    ("1000", r"\boxed{1{,}000}", 1),
    ("1000", r"\boxed{1\,000}", 1),
    ("-7", r"\boxed{ -7 }", 1),
    ("204", "204", 0),
    ("204", r"\boxed{204.0}", 0),
    ("204", r"\boxed{20}4", 0),
    ("204", r"\boxed{two hundred and four}", 0),
    ("204", r"\boxed{" + "9" * 100_000 + "}", 0),
]


def test_boxed_integer_is_the_last_box_as_a_whole_number() -> None:
    cases = [(completion, answer, {}) for answer, completion, _ in INTEGERS]
    assert rewards_of("boxed_integer", *cases) == [right for *_, right in INTEGERS]


PATTERNS = [
    # pattern, completion, whether it is found: as re.search of Python 3.12 does
    (r"\b42\b", "it is 42.", 1),
    (r"\b42\b", "it is 421.", 0),
    (r"\A42\Z", "42", 1),
    (r"\A42\Z", "42\n", 0),
    ("(?i)paris", "PARIS", 1),
    ("paris", "PARIS", 0),
    ("a.c", "a\nc", 0),
    ("(?s)a.c", "a\nc", 1),
    (r"(?m)^Answer: \d+$", "Well.\nAnswer: 7\nDone.", 1),
    (r"(\w)\1", "book", 1),
    (r"(?<=-)\w+", "spam-egg", 1),
    ("π+", "ππ", 1),
]


def test_a_regular_expression_is_the_row_s_column_or_its_answer() -> None:
    expected = [right for *_, right in PATTERNS]
    assert rewards_of("regex_match", *[(text, "x", {"pattern": pattern}) for pattern, text, _ in PATTERNS]) == expected
    assert rewards_of("regex_match", *[(text, pattern, {}) for pattern, text, _ in PATTERNS]) == expected
    assert rewards_of("regex_match", ("b", "b", {"pattern": None})) == [1.0], "a column that the row leaves empty"


def test_a_regular_expression_that_never_ends_costs_its_own_sample() -> None:
    cases = [("a" * 50 + "b", "", {"pattern": "(a+)+$"}), ("a" * 50, "", {"pattern": "(a+)+$"})]
    assert rewards_of("regex_match", *cases, timeout_s=1, max_unjudged_frac=0.5) == [None, 1.0]
    slow = {"schema": {"type": "string", "pattern": "(a+)+$"}}
    cases = [(json.dumps("a" * 50 + "b"), "", slow), (json.dumps("a"), "", slow)]
    assert rewards_of("json_schema", *cases, timeout_s=1, max_unjudged_frac=0.5) == [None, 1.0]


# From json-schema-org/JSON-Schema-Test-Suite, tests/draft2020-12 (MIT): pattern.json at 1245e6e, required.json at f652344,
# items.json at 6680a00, additionalProperties.json at 0b780b2.
SCHEMAS: list[tuple[Any, list[tuple[Any, int]]]] = [
    ({"pattern": "^a*$"}, [("aaa", 1), ("abc", 0), (True, 1), (123, 1), ({}, 1), (None, 1)]),
    ({"pattern": "a+"}, [("xxaayy", 1)]),
    ({"pattern": "^π$"}, [("π", 1), ("p", 0), ("ππ", 0)]),
    ({"properties": {"foo": {}, "bar": {}}, "required": ["foo"]}, [({"foo": 1}, 1), ({"bar": 1}, 0), ([], 1), ("", 1), (12, 1)]),
    ({"required": ["__proto__", "toString"]}, [({}, 0), ({"__proto__": "foo"}, 0), ({"__proto__": 1, "toString": 2}, 1)]),
    ({"items": {"type": "integer"}}, [([1, 2, 3], 1), ([1, "x"], 0), ({"foo": "bar"}, 1)]),
    ({"items": False}, [([1, "foo", True], 0), ([], 1)]),
    ({"prefixItems": [{"type": "string"}], "items": {"type": "integer"}}, [(["x", 2, 3], 1), (["x", "y"], 0)]),
    (
        {
            "$defs": {
                "item": {"type": "array", "items": False, "prefixItems": [{"$ref": "#/$defs/sub-item"}]},
                "sub-item": {"type": "object", "required": ["foo"]},
            },
            "type": "array",
            "items": {"$ref": "#/$defs/item"},
        },
        [([[{"foo": None}], [{"foo": None}]], 1), ([[{"foo": None}, {"foo": None}]], 0), ([{"foo": None}], 0), ([[{}]], 0)],
    ),
    (
        {"properties": {"foo": {}, "bar": {}}, "patternProperties": {"^v": {}}, "additionalProperties": False},
        [({"foo": 1}, 1), ({"foo": 1, "bar": 2, "quux": "boom"}, 0), ([1, 2, 3], 1), ({"foo": 1, "vroom": 2}, 1)],
    ),
    ({"propertyNames": {"maxLength": 5}, "additionalProperties": {"type": "number"}}, [({"apple": 4}, 1), ({"pear": "x"}, 0)]),
]


def test_a_json_schema_is_the_row_s_column_as_an_object_or_as_text_or_its_answer() -> None:
    vectors = [(schema, json.dumps(value), right) for schema, values in SCHEMAS for value, right in values]
    expected = [right for *_, right in vectors]
    assert rewards_of("json_schema", *[(value, "x", {"schema": schema}) for schema, value, _ in vectors]) == expected
    assert rewards_of("json_schema", *[(value, "x", {"schema": json.dumps(schema)}) for schema, value, _ in vectors]) == expected
    assert rewards_of("json_schema", *[(value, json.dumps(schema), {}) for schema, value, _ in vectors]) == expected


@pytest.mark.parametrize(
    "completion", ["", "{", "Sure: {}", "```json\n{}\n```", "NaN", "-Infinity", "{} {}", "'a'", "[" * 100_000, "9" * 5000]
)
def test_a_completion_that_is_no_json_is_wrong_and_not_unjudged(completion: str) -> None:
    assert rewards_of("json_schema", (completion, "true", {}), (" {}\n", "true", {})) == [0.0, 1.0]


def test_a_schema_s_references_are_never_loaded(tmp_path: Path) -> None:
    """Not from a server that has the schema either."""
    (tmp_path / "any.json").write_text("true")
    asked: list[str] = []

    class Files(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/any.json"
        with pytest.raises(RewardFailed, match=rf"1 of 1 samples \(exception 1\).*Unresolvable: {address}"):
            rewards_of("json_schema", ("1", "", {"schema": {"$ref": address}}))
        server.shutdown()
    assert asked == []


# What verl's own function gives (verl-project/verl, verl/utils/reward_score/math_reward.py at 1dda039, Apache-2.0), run on these texts.
MATH = [
    # completion, truth, score
    (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
    (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1),
    (r"\boxed{0.5}", r"1/2", 1),
    (r"\boxed{.5}", r"\frac12", 1),
    (r"\boxed{1} then \boxed{2}", r"2", 1),
    (r"\boxed{1} then \boxed{2}", r"1", 0),
    (r"$\boxed 7$ apples", r"7", 1),
    (r"\fbox{7}", r"7", 0),
    (r"the answer is 7", r"7", 0),
    (r"\boxed{7", r"7", 0),
    (r"\boxed{x = 5}", r"5", 1),
    (r"\boxed{xyz = 5}", r"5", 0),
    (r"\boxed{10\text{ units}}", r"10", 1),
    (r"\boxed{10\%}", r"10", 1),
    (r"\boxed{10%}", r"10", 0),
    (r"\boxed{90^\circ}", r"90", 1),
    (r"\boxed{\left(x-2\right)}", r"(x-2)", 1),
    (r"\boxed{\sqrt3}", r"\sqrt{3}", 1),
    (r"\boxed{\$5}", r"5", 1),
    (r"\boxed{1,000}", r"1000", 0),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt3}2", 0),
    (r"\boxed{\text{A}}", r"A", 0),
    (r"\boxed{}", r"0", 0),
    (r"\boxed{\frac}", r"\frac", 1),
    (r"\boxed{4, 10}", r"4,10", 1),
    (r"\boxed{10, 4}", r"4, 10", 0),
]
# From hendrycks/math, modeling/math_equivalence_test.py at 5f3bf91 (MIT).
EQUAL = [
    (r"\tfrac{1}{2} + \frac1{72}", r"\\frac{1}{2} + 2/3", 0),
    ("10, 4, -2", "4, 10, -2", 0),
    ("10, 4, 2", "4, 12, 2", 0),
    (r"\tfrac{1}{2} +\! \frac1{72}", r"\\dfrac{1}{2} +\frac{1}{72}", 1),
    (r"10\text{ units}", "10 ", 1),
    (r"10\text{ units}", "100 ", 0),
    ("10", r"\$10", 1),
    (r"\left(x-2\right)\left(x+2\right)", "(x-2)(x+2)", 1),
    ("0.1, 4, 2", "4, .1, 2", 0),
    ("0.1", ".1", 1),
    (r"10\%", "10", 1),
    (r"10\sqrt{3} + \sqrt4", r"10\sqrt3 + \sqrt{4}", 1),
    (r"\frac34i", r"\frac{3}{4}i", 1),
    (r"\tfrac83", r"\frac{8}{3}", 1),
    ("5x - 7y + 11z + 4 = 0", "x + y - z + 2 = 0", 0),
    ("1/2", r"\frac{1}{2}", 1),
]


def test_the_reward_for_math_is_verls_to_the_bit() -> None:
    cases = [*MATH, *((rf"\boxed{{{first}}}", second, right) for first, second, right in EQUAL)]
    expected = [right for *_, right in cases]
    assert rewards_of("math_verl", *[(completion, truth, {}) for completion, truth, _ in cases]) == expected
    row = {"data_source": "HuggingFaceH4/MATH-500"}
    assert rewards_of("verl", *[(completion, truth, row) for completion, truth, _ in cases]) == expected


# What verl's own function gives (verl-project/verl, verl/utils/reward_score/math_dapo.py at 1dda039, Apache-2.0), run on these texts.
DAPO = [
    # completion, truth, score
    ("Answer: 33", "33", 1),
    ("so Answer: $33$", "33", 1),
    ("answer : 033", "33", -1),
    ("Answer: 1,000", "1000", 1),
    ("Answer: x = 5", "5", 1),
    ("Answer: \\frac12", "\\frac{1}{2}", 1),
    ("Answer: \\dfrac12", "\\frac{1}{2}", -1),
    ("Answer: 5 units", "5", 1),
    ("Answer: 90^\\circ", "90", 1),
    ("Answer: \\boxed{7}", "7", 1),
    ("Answer: 7.", "7", -1),
    ("Answer: 6\nAnswer: 7", "7", 1),
    ("Answer: 7\nAnswer: 6", "7", -1),
    ("The answer is \\boxed{7}", "7", 1),
    ("The answer is 7", "7", -1),
    ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac12", -1),
    ("\\boxed{7", "7", -1),
    ("Answer:\n7", "7", 1),
    ("Answer: \\sqrt3", "\\sqrt{3}", 1),
    ("Answer: \\text{A}", "A", 1),
    ("**Answer:** 7", "7", -1),
    ("Answer: [INVALID]\n\\boxed{7}", "7", 1),
    ("", "7", -1),
    ("Answer: 14{,}916", "14916", 1),
    ("\\fbox{7}", "7", -1),
    ("Answer: 3 \\text{ and } 4", "3,4", 1),
    ("Answer: 12$ and $13", "12 and 13", -1),
    ("Answer: 7" + "." * 400, "7", -1),
]


def test_the_reward_for_dapos_data_is_verls_to_the_bit() -> None:
    expected = [right for *_, right in DAPO]
    for source in ("math_dapo", "aime_2024"):
        cases = [(completion, truth, {"data_source": source}) for completion, truth, _ in DAPO]
        assert rewards_of("verl", *cases) == expected


def test_the_answer_for_math_may_be_the_solution_with_its_box() -> None:
    solution = r"As \boxed{1} is too small, it is $\boxed{\dfrac{1}{2}}$."
    assert rewards_of("math_verl", (r"\boxed{0.5}", solution, {}), (r"\boxed{1}", solution, {})) == [1.0, 0.0]


def test_the_row_s_data_source_chooses_verls_rule_and_its_ground_truth_comes_first() -> None:
    def verls(source: str, truth: str) -> dict[str, Any]:
        return {"data_source": source, "reward_model": {"style": "rule", "ground_truth": truth}}

    gsm8k, math = "openai/gsm8k", "DigitalLearningGmbH/MATH-lighteval"
    cases = [
        ("so #### 72", "", verls(gsm8k, "72"), 1.0),
        (r"\boxed{72}", "", verls(gsm8k, "72"), 0.0),
        (r"\boxed{72}", "", verls(math, "72"), 1.0),
        ("so #### 72", "", verls("lighteval/MATH", "72"), 0.0),
        ("so #### 72", "9", verls(gsm8k, "72"), 1.0),
        ("so #### 9", "9", {"data_source": gsm8k}, 1.0),
    ]
    assert rewards_of("verl", *[case[:3] for case in cases]) == [case[3] for case in cases]


def test_a_row_s_own_answer_is_right_in_the_form_that_the_reward_reads() -> None:
    prompts = [Prompt(0, 0, "?", "72", [1], 0, {"data_source": "openai/gsm8k"})]
    prompts += [Prompt(1, 1, "?", r"\frac12", [1], 0, {"data_source": "lighteval/MATH"})]
    dapo = Prompt(2, 2, "?", r"\frac12", [1], 0, {"data_source": "math_dapo"})
    assert rewards_of_own_answers(RewardConfig(name="verl", workers=1), [*prompts, dapo]) == [1.0, 1.0, 1.0]
    assert rewards_of_own_answers(RewardConfig(name="math_verl", workers=1), prompts) == [1.0, 1.0]


def test_the_penalty_for_length_is_dapos() -> None:
    """As TRL's tests have it (huggingface/trl, tests/test_rewards.py at f2cd577, Apache-2.0), and at the ends of the slope."""

    def penalty(num_tokens: int, longest: float, soft: float) -> float:
        return OverlongPenalty()(output_tokens=[1] * num_tokens, row={"max_completion_len": longest, "soft_punish_cache": soft})

    assert [penalty(length, 100, 20) for length in (50, 110, 90)] == [0, -1, -0.5]
    assert [penalty(length, 100.0, 20.0) for length in (0, 80, 81, 100, 101)] == [0, 0, -0.05, -1, -1]
    assert [penalty(length, 100, 0) for length in (100, 101)] == [0, -1]
    row = {"max_completion_len": 1, "soft_punish_cache": 1}
    assert rewards_of("overlong_penalty", ("x", "", row), ("x", "", row | {"max_completion_len": 5})) == [-1.0, 0.0]


# From huggingface/Math-Verify, tests/test_all.py at cf14bc4 (MIT): answer, completion, whether they are equal.
VERIFIED = [
    ("-5", "-5", 1),
    ("7425000", "7,425,000", 1),
    ("1000", "1 000", 1),
    ("1000.99", "$1,000.99", 1),
    ("1000.99", "the number is not 10 which is 1,000.99€", 1),
    ("2", "AZYUK2A", 0),
    (r"\frac{10}{9}", "10/9", 1),
    ("[0,1)", "$[0,1)$", 1),
    ("[0,9)", "$[0,1)$", 0),
    ("(0,9)", "$[0,9)$", 0),
    ("9", r"Answer \[ 9 \]", 1),
    ("10", r"Answer \( (9+1) \)", 1),
    ("9", "Answer $ \n 9 \n $", 1),
    ("1/3", r"$\cfrac{1}{3} $", 1),
    ("1/3", r"$\left( \frac{1}{3} \right)$", 1),
    ("1/3", r"$\frac{1}{3} \text{meters}$", 1),
    ("1/3", r"$k = \frac{1}{3}$", 1),
    (r"28\%", "28 percent", 1),
    (r"28\%", "28", 1),
    ("0.28", "28", 0),
    ("28", "28/100", 0),
    ("2-2p", r"If $2-x=p$, then $x=2-p$. Thus $x-p=\boxed{2-2p}$.", 1),
    (r"\text{Evelyn}", r"Therefore, $\boxed{\text{Evelyn}}$ is our answer.", 1),
]


def test_the_reward_math_verify_is_its_library_s_also_where_the_answer_is_a_solution() -> None:
    expected = [right for *_, right in VERIFIED]
    assert rewards_of("math_verify", *[(completion, answer, {}) for answer, completion, _ in VERIFIED]) == expected
    solution = r"As \boxed{1} is too small, it is $\boxed{(x+1)^2}$."
    cases = [(r"\boxed{x^2+2x+1}", solution, {}), (r"\boxed{1}", solution, {}), ("I cannot say.", solution, {})]
    assert rewards_of("math_verify", *cases) == [1.0, 0.0, 0.0]


def test_an_expression_that_takes_for_ever_is_unjudged_and_never_0() -> None:
    cases = [(r"\boxed{9^{9^{9^{9}}}!}", "7", {}), (r"\boxed{7}", "7", {})]
    assert rewards_of("math_verify", *cases, timeout_s=2, max_unjudged_frac=0.5) == [None, 1.0]


# From openai/human-eval, data/example_problem.jsonl and HumanEval/2 at 463c980 (MIT), and google-research/mbpp, task 2 (CC-BY-4.0).
RETURN_1 = {"entry_point": "return1", "test": "def check(candidate):\n    assert candidate() == 1"}
TRUNCATE = {
    "entry_point": "truncate_number",
    "test": "def check(candidate):\n    assert candidate(3.5) == 0.5\n    assert abs(candidate(1.33) - 0.33) < 1e-6\n"
    "    assert abs(candidate(123.456) - 0.456) < 1e-6\n",
}
SIMILAR = {
    "test_setup_code": "",
    "test_list": [
        "assert set(similar_elements((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))",
        "assert set(similar_elements((1, 2, 3, 4),(5, 4, 3, 7))) == set((3, 4))",
        "assert set(similar_elements((11, 12, 14, 13),(17, 15, 14, 13))) == set((13, 14))",
    ],
}
REVERSED = {"tests": {"inputs": ["abc\n", "x"], "outputs": ["cba\n", "x\n\n"]}}
CODE = [
    ("def return1():\n    return 1", RETURN_1, 1),
    ("def return1():\n    return 2", RETURN_1, 0),
    ("def return2():\n    return 1", RETURN_1, 0),
    ("def truncate_number(number: float) -> float:\n    return number % 1.0", TRUNCATE, 1),
    ("def truncate_number(number: float) -> float:\n    return number // 1.0", TRUNCATE, 0),
    ("def similar_elements(a, b):\n  res = tuple(set(a) & set(b))\n  return (res)", SIMILAR, 1),
    ("def similar_elements(a, b):\n  return a", SIMILAR, 0),
    ("First ```python\nx\n```, then\n```python\ndef f():\n    return 3\n```\nas asked.", {"tests": ["assert f() == 3"]}, 1),
    ("print(input()[::-1])", REVERSED, 1),
    ("import sys\nif __name__ == '__main__':\n    print(input()[::-1])\n    sys.exit()", REVERSED, 1),
    ("print(input())", REVERSED, 0),
    ("print('cba')", REVERSED, 0),
    ("print(input()[::-1])\nraise SystemExit(1)", REVERSED, 0),
    ("print(input()[::-1])", {"tests": json.dumps(REVERSED["tests"])}, 1),
    ("this is no Python", RETURN_1, 0),
    ("", RETURN_1, 0),
]
HOSTILE = [
    "import sys; sys.exit(0)",
    "import os; os._exit(0)",
    "while True: pass",
    "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    "while True: print('x' * 10**6)",
    "x = [0]\nwhile True: x += x",
    "import os; os.kill(os.getppid(), 0); os.abort()",
    "def f(): f()\nf()",
]


DOUBLED = "def f(x):\n    return 2 * x\n"
BLOCKS = [
    f"Install it:\n```bash\npip install numpy\n```\nThen:\n```python\n{DOUBLED}```\n",
    f"```Python\n{DOUBLED}```\nAn example:\n```text\nf(2) -> 4\n```\nDone.",
    f"```json\n{{}}\n```\n```\n{DOUBLED}```\n```console\n$ python f.py\n```",
    f"Take ```f``` as it is:\n```py\n{DOUBLED}```",
    f"It is ```f```\n```python3 \n{DOUBLED}```",
    f"Here: ```\n{DOUBLED}```",
    f"so:```python\n{DOUBLED}```",
    "1. As follows.\n\n   ```python\n   def f(x):\n       return 2 * x\n   ```\n",
]


def test_blocks_of_other_languages_and_lists_do_not_hide_code() -> None:
    row = {"tests": "assert f(2) == 4"}
    assert rewards_of("python_tests", *[(text, "", row) for text in BLOCKS]) == [1.0] * len(BLOCKS)
    assert rewards_of("python_tests", (f"```bash\n{DOUBLED}```", "", row)) == [0.0]


def test_code_passes_the_tests_of_its_row() -> None:
    assert rewards_of("python_tests", *[(code, "", row) for code, row, _ in CODE]) == [right for *_, right in CODE]


def test_code_that_ends_early_or_takes_too_much_has_failed() -> None:
    row, begin = {"tests": "pass", "time_limit_s": 1}, time.monotonic()
    assert rewards_of("python_tests", ("while True: pass", "", row)) == [0.0]
    assert time.monotonic() - begin < WAIT_FACTOR, "its CPU time ends it, not the time to wait"
    assert rewards_of("python_tests", *[(code, "", row) for code in HOSTILE], memory_mib=512) == [0.0] * len(HOSTILE)


def test_nothing_of_the_code_is_left_and_it_sees_neither_our_variables_nor_our_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    late = tmp_path / "late"
    leaves = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1.5)\n"
    leaves += f"    open({str(late)!r}, 'w')\n    time.sleep(60)"
    asks = "import os\nassert 'MY_KEY' not in os.environ and not os.listdir()\n"
    asks += "for name in ('infra', 'numpy'):\n    try:\n        __import__(name)\n    except ImportError:\n        continue\n"
    asks += "    raise ValueError(name)"
    cases = [(leaves, "", {"tests": "pass"}), (asks, "", {"tests": "pass"})]
    assert rewards_of("python_tests", *cases, environment=["MY_KEY"]) == [1.0, 1.0]
    time.sleep(2)
    assert not late.exists()


def test_a_process_that_is_killed_from_outside_is_unjudged() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    cases = [(code, "", {"tests": "pass"}), ("", "", {"tests": "pass"})]
    assert rewards_of("python_tests", *cases, max_unjudged_frac=0.5) == [None, 1.0]


# From huggingface/trl, tests/test_rewards.py at f2cd577 (Apache-2.0).
THOUGHTS = [
    ("<think>This is my reasoning.</think>This is my answer.", 1),
    ("<think>\nThis is my reasoning.\n</think>\nThis is my answer.", 1),
    ("<think>\nThis is\nmy reasoning.\n</think>\nThis is my answer.", 1),
    ("<think>\nThis is <some tag> my reasoning.</think>\nThis is my answer.", 1),
    ("<think></think>\nThis is my answer.", 1),
    ("<think>\nThis is my reasoning.\nThis is my answer.", 0),
    ("<think>This is my reasoning.\nThis is my answer.", 0),
    ("This is my reasoning. This is my answer.", 0),
    ("This is my reasoning.\nThis is my answer.", 0),
    ("This is my reasoning.</think>\nThis is my answer.", 0),
    ("This is my reasoning.</think>This is my answer.", 0),
    ("This<think>is my reasoning.</think>\nThis is my answer.", 0),
    ("<think>This is<think>my reasoning.</think></think>This is my answer.", 0),
    ("<think>This is</think>\nmy\n<think>reasoning.</think>\nThis is my answer.", 0),
]


def test_the_format_of_thoughts_is_trls() -> None:
    assert rewards_of("think_format", *[(text, "", {}) for text, _ in THOUGHTS]) == [right for _, right in THOUGHTS]


WRONG_ROWS = [
    ("exact_match", " ", {}, "the row's answer is empty: exact_match needs the text that is right"),
    ("regex_match", "(", {}, r"the row's answer '\(' is no regular expression of Python's re: missing \), .*: correct it"),
    (
        "regex_match",
        "x",
        {"pattern": "*"},
        r"the row's column 'pattern' '\*' is no regular expression of Python's re: nothing to",
    ),
    ("regex_match", "", {}, "the row's answer is '': regex_match needs a regular expression as text there"),
    ("regex_match", "x", {"pattern": 3}, "the row's column 'pattern' is 3: regex_match needs a regular expression as text there"),
    ("json_schema", "Paris", {}, "the row's answer 'Paris' is no JSON schema: Expecting value: .*: correct it"),
    ("json_schema", "3", {}, "the row's answer '3' is no JSON schema: a schema is an object or a boolean: correct it"),
    (
        "json_schema",
        "",
        {"schema": {"type": "text"}},
        r"the row's column 'schema' \{'type': 'text'\} is no JSON schema: 'text' is not valid",
    ),
    ("math_verl", "", {}, r"the row's answer '' is not right in its own \\boxed\{\}: give LaTeX with braces in pairs, not empty"),
    ("boxed_integer", "4.5", {}, r"the row's answer '4.5' is no whole number: boxed_integer needs one, such as 033"),
    ("math_verl", "}", {}, r"the row's answer '\}' is not right in its own \\boxed"),
    ("math_verl", r"\boxed{1", {}, r"the row's answer .* has a \\boxed without its braces: correct it"),
    (
        "verl",
        "7",
        {"data_source": "codecontests"},
        "column 'data_source' is 'codecontests': verl's rules are here for openai/gsm8k, light",
    ),
    ("verl", "7", {}, "the row's column 'data_source' is None: verl's rules are here for"),
    (
        "verl",
        "many",
        {"data_source": "openai/gsm8k"},
        "the row's answer 'many' is not right after its own '#### ': give a number",
    ),
    (
        "verl",
        "7\n8",
        {"data_source": "math"},
        r"the row's answer '7\\n8' is not right after its own 'Answer: ': give one line, not empty",
    ),
    (
        "overlong_penalty",
        "",
        {},
        "the row's column 'max_completion_len' is None: overlong_penalty needs a number of tokens there",
    ),
    (
        "overlong_penalty",
        "",
        {"max_completion_len": 9, "soft_punish_cache": 20},
        "the row's column 'soft_punish_cache' is 20: give at most its 'max_completion_len', 9",
    ),
    ("math_verify", "}", {}, r"the row's answer '\}' is not right in its own \\boxed"),
    ("python_tests", "", {}, "the row has no tests: python_tests needs the column 'tests'"),
    ("python_tests", "", {"tests": "assert ("}, r"the row's tests 'assert \(' are no Python: .*: correct them"),
    ("python_tests", "", {"tests": [3]}, r"the row's tests are \[3\]: give Python statements as text, or as a list of texts"),
    (
        "python_tests",
        "",
        {"tests": {"inputs": ["x"], "outputs": []}},
        "the row's tests are .*: give as many 'inputs' as 'outputs'",
    ),
    ("python_tests", "", {"tests": "{"}, r"the row's tests are '\{': give as many 'inputs' as 'outputs'"),
    ("python_tests", "", {"tests": "pass", "time_limit_s": 0}, "column 'time_limit_s' is 0: give seconds above 0"),
    ("json_schema", "", {"schema": {"pattern": "("}}, r"column 'schema' .* is no JSON schema: '\(' is not a 'regex': correct it"),
]


@pytest.mark.parametrize(("name", "answer", "row", "message"), WRONG_ROWS)
def test_a_row_that_is_wrong_is_named_before_the_run_and_is_never_0(
    name: str, answer: str, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"reward '{name}' cannot judge by row 7 of data set 'x': .*{message}") as found:
        check_own_answers(name, "x", [(7, Row("?", answer, row))])
    assert "\n" not in str(found.value)
    with pytest.raises(RewardFailed, match=rf"{name}.* 1 of 1 samples \(exception 1\).*{message}"):
        rewards_of(name, ("1", answer, row))


def test_a_row_that_is_right_is_not_refused() -> None:
    check_own_answers("exact_match", "x", [(0, Row("?", "Paris"))])
    check_own_answers("regex_match", "x", [(0, Row("?", "", {"pattern": "a+"}))])
    check_own_answers("json_schema", "x", [(0, Row("?", "", {"schema": {"type": "object"}}))])
