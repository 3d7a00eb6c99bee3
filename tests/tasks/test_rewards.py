import errno
import json
import logging
import re
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from prefect.states import Failed

from flows import presets
from infra.config import RewardConfig
from infra.data.dataset import Row
from infra.data.prompts import Prompt
from infra.failures import NoNodeForEngine, NoNodesForRanks, RewardFailed, StoreRefused
from infra.rewards import client
from infra.rewards.built_in import gsm8k
from infra.rewards.outcome import Outcome, of_value, parts_of
from infra.rewards.scores import fields_of
from infra.store import code_digest
from infra.store.files import DigestMismatch
from infra.store.samples import Sample
from tasks import rewards
from tasks.rewards.own_answers import check_own_answers
from tasks.support.prefect_calls import FlowRunDeleted

# What verl's own function gives (verl-project/verl, verl/utils/reward_score/gsm8k.py at 1dda039), run on these texts:
# the extraction and whether it scores 1. verl can give part of a point for a wrong number; by default, and here, that is 0.
VERL = [
    # completion, truth, strict extraction, strict score, flexible extraction, flexible score
    ("so #### 72", "72", "72", 1, "72", 1),
    ("#### 72.", "72", "72.", 0, "72.", 0),
    ("#### $72", "72", None, 0, "72", 1),
    ("#### 1,234", "1234", "1234", 1, "1,234", 0),
    ("#### 72.0", "72", "72.0", 0, "72.0", 0),
    ("#### 1 then #### 2", "2", "2", 1, "2", 1),
    ("####72", "72", None, 0, "72", 1),
    ("#### -5", "-5", "-5", 1, "-5", 1),
    ("#### 72 dollars", "72", "72", 1, "72", 1),
    ("the answer is 72.", "72", None, 0, "72.", 0),
    (r"\boxed{72}", "72", None, 0, "72", 1),
    ("I paid . , .", "", None, 0, ",", 0),
    ("#### ,", "", "", 1, ",", 0),
    ("#### 72" + " and so on" * 30, "72", None, 0, None, 0),
    # only the last 300 characters count, and all of them
    ("#### 72" + "x" * 293, "72", "72", 1, "72", 1),
    ("#### 72" + "x" * 294, "72", None, 0, "72", 1),
    ("#### 72" + "x" * 299, "72", None, 0, "2", 0),
    # a lone dot is no number, unless there is nothing else
    ("it is 5 . . .", "5", None, 0, "5", 1),
    ("well . .", "5", None, 0, ".", 0),
    ("", "5", None, 0, None, 0),
]


@pytest.mark.parametrize(("completion", "truth", "strict", "strict_score", "flexible", "flexible_score"), VERL)
def test_the_verl_rewards_are_verls_to_the_bit(
    completion: str, truth: str, strict: str | None, strict_score: int, flexible: str | None, flexible_score: int
) -> None:
    assert gsm8k.extract_strict(completion) == strict
    assert gsm8k.extract_flexible(completion) == flexible
    for answer in (truth, f"A worked solution.\n#### {truth}"):
        assert gsm8k.verl_strict(question="", completion=completion, answer=answer) == strict_score
        assert gsm8k.verl_flexible(question="", completion=completion, answer=answer) == flexible_score


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("72", "72"), ("6*12=<<6*12=72>>72\n#### 72", "72"), ("#### 1,234,567", "1234567"), ("one #### 1\n#### -2 ", "-2")],
)
def test_the_truth_is_what_stands_behind_the_last_mark_of_a_solution(answer: str, truth: str) -> None:
    assert gsm8k.ground_truth(answer) == truth


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        ("so #### 72", "72"),
        ("#### 72.", "72"),
        ("#### $72", "72"),
        ("#### -$72", "-72"),
        ("#### $-72", "-72"),
        ("#### 1,234", "1234"),
        ("#### $1,234,567.50.", "1234567.5"),
        ("#### 72.0", "72"),
        ("#### .5", "0.5"),
        ("#### 1 then #### 2", "2"),
        ("#### 1\n#### 2\nthat is 3 more", "2"),
        ("####72", "72"),
        ("####\n72", "72"),
        ("#### -5", "-5"),
        ("#### 72 dollars for 3", "72"),
        ("#### the total is 72 dollars", "72"),
        ("#### \\boxed{72}", "72"),
        ("5 \\boxed{71} or \\boxed{72} in 3 days", "72"),
        (r"\boxed{\$1,234.00}", "1234"),
        ("the answer is 72.", "72"),
        ("first 3, then 5, so 8,", "8"),
        ("3 + 4 = 7", "7"),
        ("no number", None),
        ("", None),
        ("I paid . , .", None),
        ("72, that is #### nothing", None),
        ("#### 72" + " and so on" * 100, "72"),
        # an operator is no sign
        ("10-7", "7"),
        ("so 10 - 7", "7"),
        ("x=-7", "-7"),
        ("it is -$72", "-72"),
        ("\u22127", "-7"),
        ("#### \u2212$1,234", "-1234"),
        # a marker with nothing behind it says nothing
        ("18 ####", "18"),
        ("18 ####.", "18"),
        ("#### 18\n####", "18"),
        (r"18 \boxed{}", "18"),
        (r"\boxed{18} ####", "18"),
        # other notations
        ("#### 1/2", "1/2"),
        ("#### -1/2", "-1/2"),
        ("1 1/2", "3/2"),
        (r"\boxed{\frac{1}{2}}", "1/2"),
        (r"#### -\dfrac{ 3 }{4}", "-3/4"),
        (r"$2\frac{1}{2}$", "5/2"),
        ("on 12/25/2020", "2020"),
        ("1/0", None),
        ("1e3", "1000"),
        ("#### 2.5E-1", "1/4"),
        ("1e999999999", None),
        ("9" * 5000, None),
        ("#### 1 000", "1000"),
        ("1\u00a0234\u202f567.5", "1234567.5"),
        ("in 2020 100", "100"),
        (r"so \boxed{1{,}000} plums", "1000"),
        (r"\boxed{\$1,\!234{,}567.5}", "1234567.5"),
        (r"#### 12\,500 \%", "12500"),
        (r"It is $1{,}000$.", "1000"),
        ("48/2 = <<48/2=24>>24", "24"),
    ],
)
def test_the_numeric_reward_reads_the_final_answer(completion: str, found: str | None) -> None:
    assert gsm8k.final_number(completion) == (None if found is None else Fraction(found))
    if found is None:
        assert gsm8k.numeric(question="", completion=completion, answer="72") == 0.0
    else:
        assert gsm8k.numeric(question="", completion=completion, answer=f"#### {found}") == 1.0
        assert gsm8k.numeric(question="", completion=completion, answer=f"#### 1{found.strip('-')}") == 0.0


def test_numbers_are_compared_exactly() -> None:
    assert gsm8k.numeric(question="", completion="#### 0.1", answer="0.10") == 1.0
    assert gsm8k.numeric(question="", completion="#### 10000000000000000.1", answer="10000000000000000.2") == 0.0


@pytest.mark.parametrize("part", [" ", "1 ", "1/", "1", "1,", "\\boxed{", "####", "\\frac{1", "1e", "-", "####\n"])
def test_a_long_completion_of_any_kind_is_read_in_linear_time(part: str) -> None:
    """100,000 characters take up to 0.2 s; where the time grows with the square it is 10 s and more."""
    began = time.process_time()
    gsm8k.final_number(part * (100_000 // len(part)))
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "truth", ["7", "-7.", "$7", "1,234", "1 234", "\u22127", "1/2", r"\frac{1}{2}", "2 1/2", "1e3", "7.0", "Why?\n####7"]
)
def test_a_truth_in_any_notation_that_is_read_is_matched_by_itself(truth: str) -> None:
    assert gsm8k.numeric(question="", completion=f"#### {truth}", answer=truth) == 1.0
    assert gsm8k.numeric(question="", completion="#### 9", answer=truth) == 0.0


@pytest.mark.parametrize("answer", ["", "Paris", "#### ", "Answer is 12.", "12 apples", "1/0"])
def test_an_answer_that_is_no_number_is_never_right(answer: str) -> None:
    assert gsm8k.numeric(question="", completion="no number", answer=answer) == 0.0


ANSWERS = ["#### 1", "Answer is 12.", "12", "12 apples", "#### n/a", "Paris"]


@pytest.mark.parametrize("name", ["gsm8k_verl_strict", "gsm8k_verl_flexible", "gsm8k_numeric"])
def test_rows_whose_own_answer_a_built_in_reward_cannot_read_are_counted_and_shown(name: str) -> None:
    rows = [(number, Row("?", answer)) for number, answer in enumerate(ANSWERS)]
    with pytest.raises(
        ValueError,
        match=rf"reward '{name}' gives 4 of 6 rows of data set 'x' less than 1 for their own answers: "
        r"row 1 'Answer is 12\.', row 3 '12 apples', row 4 'n/a', \.\.\.: ",
    ):
        check_own_answers(name, "x", rows)
    check_own_answers(name, "x", [rows[0], rows[2]])


def test_a_reward_of_a_users_own_may_take_any_answer(own_rewards: Path) -> None:
    check_own_answers("own_rewards.brief", "x", [(0, Row("?", "Paris"))])


@pytest.mark.parametrize("name", ["gsm8k_verl_strict", "gsm8k_verl_flexible", "gsm8k_numeric"])
def test_built_in_rewards_have_names(name: str) -> None:
    assert rewards.BUILT_IN[name](question="2 + 2?", completion="#### 4", answer="#### 4") == 1.0


@pytest.fixture
def own_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `own_rewards` of a user's own."""
    path = tmp_path / "own_rewards.py"
    path.write_text(
        "def brief(*, question, completion, answer): return 1 / len(completion)\n"
        "def takes_all(**columns): return 0.0\n"
        "def takes_more(*, question, completion, answer, length): return 0.0\n"
        "def takes_less(completion, answer): return 0.0\n"
        "number = 3\n"
        "import functools\n"
        "partial = functools.partial(takes_all)\n"
        "class Judge:\n    def __call__(self, **columns): return 0.0\n"
        "judge = Judge()\n"
        "async def later(*, question, completion, answer): return 1.5\n"
        "def fails(*, question, completion, answer):\n    return {}[completion]\n"
        "def deep(*, question, completion, answer):\n    import json\n    return json.loads('{')\n"
        "def nothing(*, question, completion, answer): return None\n"
        "def not_a_number(*, question, completion, answer): return float('nan')\n"
        "def no_parts(*, question, completion, answer): return {}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return path


@pytest.fixture(autouse=True)
def _ends_pools(workspace: Path) -> Iterator[None]:
    yield
    client.close_all()


def outcome_of(name: str, completion: str) -> Outcome:
    """What a worker says of one sample."""
    config, digest = RewardConfig(name=name, workers=1), rewards.source_digest(name)
    prompt = Prompt(0, 0, "what?", "", [1], 0)
    sample = Sample(0, 0, [1], [2], [-0.1], "stop", 0, "", completion)
    fields = fields_of(sample, prompt, client.form_of(config, config.called[0], digest).takes, [sample])
    found: dict[int, Outcome] = {}
    client.judge(config, config.called[0], digest, [fields], found.__setitem__)
    return found[0]


def test_a_function_of_a_users_own_is_found_by_its_dotted_path(own_rewards: Path) -> None:
    assert outcome_of("own_rewards.brief", "four").reward == 0.25
    assert outcome_of("own_rewards.takes_less", "four").reward == 0.0


@pytest.mark.parametrize(
    ("name", "reward"), [("takes_all", 0.0), ("partial", 0.0), ("judge", 0.0), ("later", 1.5), ("Judge", 0.0)]
)
def test_columns_objects_classes_and_async_functions_are_rewards_too(own_rewards: Path, name: str, reward: float) -> None:
    assert outcome_of(f"own_rewards.{name}", "four").reward == reward


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gsm8k",
            r"reward 'gsm8k' is unknown.*; known are gsm8k_verl_strict, gsm8k_verl_flexible, gsm8k_numeric, exact_match, .*, or give a file",
        ),
        ("", r"reward '' is unknown; known are gsm8k_verl_strict"),
        ("no_such_module.f", r"reward 'no_such_module\.f' cannot be imported: No module named 'no_such_module'"),
        (
            "own_rewards.breif",
            r"reward 'own_rewards\.breif' does not exist; the nearest is brief; functions and classes there: brief, takes_all",
        ),
        ("own_rewards.number", r"reward 'own_rewards\.number' is no function but a int"),
        (
            "own_rewards.takes_more",
            r"'own_rewards\.takes_more' has a parameter 'length': it must take some of the keywords completion, ",
        ),
        ("..brief", r"reward '\.\.brief' is unknown; known are"),
    ],
)
def test_a_reward_that_cannot_be_used_is_named_with_its_fault(own_rewards: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rewards.check(RewardConfig(name=name))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"judge": {"rubric": "{completion}"}}, "reward.judge.rubric is without effect: it belongs to the reward rubric or ruler, this one is"),
        ({"model": {"path": "some-model"}}, "reward.model.path is without effect: it belongs to the reward reward_model, this one is"),
        ({"name": "any.score", "functions": [{"name": "gsm8k_numeric"}]}, "reward.name 'any.score' is without effect: reward.functions takes its"),
        ({}, ""),
        ({"functions": [{"name": "gsm8k_numeric"}]}, ""),
    ],
)  # fmt: skip
def test_fields_that_belong_to_another_reward_are_named(
    fields: dict[str, object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    rewards.check(RewardConfig.model_validate(fields))
    assert [said.rpartition(" ")[0] for said in caplog.messages] == ([message] if message else [])


def test_fields_of_a_reward_that_is_used_are_not(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards.by_model, "check", lambda config: None)
    judge = {"by": "engine", "rubric": "{completion}"}
    rewards.check(RewardConfig.model_validate({"name": "rubric", "judge": judge}))
    rewards.check(RewardConfig.model_validate({"functions": [{"name": "gsm8k_numeric"}, {"name": "rubric"}], "judge": judge}))
    assert not caplog.messages


def test_a_change_of_a_users_own_reward_is_seen(own_rewards: Path) -> None:
    def digest() -> str:
        """As a new process would see it."""
        return rewards.source_digest("own_rewards.brief")

    before = digest()
    own_rewards.write_text(own_rewards.read_text().replace("1 / len", "2 / len"))
    assert digest() != before
    assert rewards.source_digest("gsm8k_numeric") == ""


def test_a_number_is_one_part() -> None:
    assert of_value(1, {}, None) == Outcome(1.0, {"reward": 1.0})
    assert of_value({"right": 1, "brief": -0.5}, {}, None) == Outcome(0.5, {"right": 1.0, "brief": -0.5})


def test_the_key_reward_is_the_reward_and_otherwise_parts_are_weighed() -> None:
    assert of_value({"reward": 2, "right": 1, "brief": 5}, {}, None) == Outcome(2.0, {"right": 1.0, "brief": 5.0})
    assert of_value({"right": 1, "brief": 0.5}, {"brief": 0.2}, None) == Outcome(1.1, {"right": 1.0, "brief": 0.5})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1.0", 1j])
def test_a_reward_that_is_no_finite_number_is_unjudged_and_never_0(value: object) -> None:
    for whole, part in ((value, "reward"), ({"right": 1.0, "brief": value}, "brief")):
        found = of_value(whole, {}, None)
        assert found.reward is None and found.parts is None
        if whole is None:
            assert (found.reason, found.message) == ("returned None", "returned None")
        else:
            assert (found.reason, found.message) == (
                "no number",
                f"returned {value!r} for {part!r}: a finite number is needed",
            )


@pytest.mark.parametrize(
    ("value", "number"), [(True, 1.0), (np.bool_(False), 0.0), (np.float32(0.5), 0.5), (np.int64(3), 3.0), (2, 2.0), (0.25, 0.25)]
)
def test_bools_and_numpy_scalars_are_numbers(value: object, number: float) -> None:
    assert parts_of(value) == {"reward": number}
    assert parts_of({"a": value, "b": 1}) == {"a": number, "b": 1.0}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "fails",
            r"raised KeyError: 'x+'\.* at .*own_rewards\.py:13$",
        ),
        ("deep", r"raised JSONDecodeError: .* at .*own_rewards\.py:16$"),
        (
            "nothing",
            r"returned None, function at .*own_rewards\.py:\d+$",
        ),
        ("not_a_number", r"returned nan for 'reward': a finite number is needed, function at"),
        ("no_parts", r"returned an empty dict: a finite number is needed, function at"),
    ],
)
def test_a_reward_that_fails_is_one_line_with_the_place(own_rewards: Path, name: str, said: str) -> None:
    found = outcome_of(f"own_rewards.{name}", "x" * 300)
    assert found.reward is None and re.search(said, found.message) and "\n" not in found.message


def test_a_reward_s_digest_covers_the_modules_that_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are imported within a function, relatively, and by an imported module."""
    package = tmp_path / "judging"
    package.mkdir()
    texts = {
        "__init__.py": "",
        "main.py": "from . import words\ndef good(*, question, completion, answer):\n    import helpers_of_judging\n    return 0.0\n",
        "words.py": "import numpy\nfrom .deeper import LIST\n",
        "deeper.py": "LIST = [1]\n",
    }
    for name, text in texts.items():
        (package / name).write_text(text)
    (tmp_path / "helpers_of_judging.py").write_text("SCALE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    def digest() -> str:
        return rewards.source_digest("judging.main.good")

    seen = {digest()}
    for path in (package / "deeper.py", tmp_path / "helpers_of_judging.py", package / "words.py", package / "__init__.py"):
        path.write_text(path.read_text() + "MORE = 1\n")
        seen.add(digest())
    assert len(seen) == 5
    monkeypatch.setattr(code_digest, "_version_of", lambda package: f"{package} 99")
    assert digest() not in seen, "the versions of installed packages count"
    assert digest() == digest()


@pytest.mark.parametrize(
    "error",
    [
        RewardFailed("reward 'r' raised KeyError: 'x' at r.py:3"),
        RewardFailed("reward 'r' raised KeyError: 'x', completion 'a\\nb \"c\"'"),
        StoreRefused("s3://runs does not take .ratchet with these keys"),
        NoNodeForEngine("replica 0 of the engine has no node"),
        NoNodesForRanks("trainer.num_processes 4 does not fit evenly on the living nodes"),
        DigestMismatch("adapters/000003/adapter_model.safetensors has changed since it was written"),
        OSError(errno.ENOSPC, "No space left on device: 1162 bytes for samples.journal"),
    ],
)
def test_an_error_of_one_line_is_logged_once_and_without_a_traceback(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("prefect.task_runs", "prefect.flow_runs"):
        logging.getLogger(name).error("Encountered exception during execution: %r", error, exc_info=error)
    logging.getLogger("prefect.flow_runs").error("Finished in state %s", Failed(message=f"an exception RewardFailed: {error}"))
    logging.getLogger("prefect.flow_runs").error("something else")
    assert [(record.getMessage(), record.exc_info) for record in caplog.records] == [(str(error), None), ("something else", None)]


def test_an_error_that_is_raised_again_while_it_is_handled_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("prefect.flow_runs")
    try:
        raise FlowRunDeleted("deleted")
    except FlowRunDeleted as first:
        logger.error("Encountered exception: %r", first, exc_info=first)
        with pytest.raises(FlowRunDeleted) as second:
            raise FlowRunDeleted("deleted")  # noqa: B904  as Prefect's engine does, which reports the state again
        logger.error("Engine execution exited", exc_info=second.value)
    assert [(record.getMessage(), record.exc_info) for record in caplog.records] == [("deleted", None)]


def test_of_values_only_what_our_own_code_refuses_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    for refused in (lambda: presets.preset("smokey"), lambda: json.loads("{")):
        with pytest.raises(ValueError) as caught:
            refused()
        logging.getLogger("prefect.flow_runs").error("Encountered exception: %r", caught.value, exc_info=caught.value)
    first, second = caplog.records
    assert "smokey" in first.getMessage() and first.exc_info is None
    assert second.exc_info, "the place of a mistake of ours is shown"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"a/../b": 1.0}, "a part named 'a/../b': letters without"),
        ({7: 1.0}, "a part named 7: letters without"),
        ({"a": 1e308, "b": 1e308}, "parts whose sum is inf: a finite number"),
        ({"a": 10**400}, r"10{199} for 'a': a finite number"),
    ],
)
def test_parts_that_make_no_reward_or_no_metric_are_refused(parts: dict[str, float], message: str) -> None:
    found = of_value(parts, {}, None)
    assert found.reward is None and re.match(f"returned {message}", found.message)
