"""Check that a data set has the answers that the chosen reward takes, and that they are correct according to it."""

from collections.abc import Iterable, Sequence
from functools import cache

from infra.config import DataConfig, RewardConfig, RewardFunction
from infra.data import dataset
from infra.data.dataset import Row
from infra.data.prompts import Prompt
from infra.failures import RewardFailed
from infra.rewards import built_in, client
from infra.rewards.built_in import gsm8k
from infra.rewards.judges import rubric
from infra.rewards.outcome import Outcome
from infra.rewards.scores import fields_of
from infra.rewards.signatures import ANSWER, Form
from infra.store.samples import Sample
from tasks.rewards import BUILT_IN, NAMES, by_model, source_digest
from tasks.rewards.apply import called, combined

NUM_SHOWN = 3


def rewards_of_own_answers(config: RewardConfig, prompts: Sequence[Prompt]) -> list[float] | None:
    """Return the rewards of the prompts' own answers as completions; in the form `#### answer` where the reward is built in. None: a model
    judges, which may cost money, or scores, which has to be loaded.

    Raises:
        RewardFailed: for an answer that cannot be judged.
    """
    if config.is_judged_by_model or config.uses_reward_model:
        return None
    found: list[float] = []
    for result, prompt in zip(_outcomes(config, prompts), prompts, strict=True):
        if result.reward is None:
            raise RewardFailed(f"reward {config.title!r} {result.message}, for question {prompt.question!r} and its own answer")
        found.append(result.reward)
    return found


def _outcomes(config: RewardConfig, prompts: Sequence[Prompt]) -> list[Outcome]:
    by_function = [_outcomes_of(config, function, prompts) for function in config.called]
    return [combined(config, results) for results in zip(*by_function, strict=True)]


def _outcomes_of(config: RewardConfig, function: RewardFunction, prompts: Sequence[Prompt]) -> list[Outcome]:
    if function.name in BUILT_IN:
        return [_of_own_answer(function, prompt.question, prompt.answer) for prompt in prompts]
    digest = source_digest(function.name)
    takes = client.form_of(config, function, digest).takes
    found: dict[int, Outcome] = {}
    samples = [_as_sample(function.name, prompt) for prompt in prompts]
    fields = [fields_of(sample, prompt, takes, [sample]) for sample, prompt in zip(samples, prompts, strict=True)]
    client.judge(config, function, digest, fields, found.__setitem__)
    return [found[number] for number in range(len(prompts))]


def _as_sample(name: str, prompt: Prompt) -> Sample:
    own = built_in.made(name).own_completion(prompt.answer, prompt.row) if name in built_in.PLACES else prompt.answer
    return Sample(prompt.prompt_id, 0, prompt.prompt_tokens, [], [], "stop", 0, "", own)


def _of_own_answer(function: RewardFunction, question: str, answer: str) -> Outcome:
    return called(function, question=question, completion=f"#### {gsm8k.ground_truth(answer)}", answer=answer)


@cache
def check_data_set(name: str, config: DataConfig) -> None:
    """Check all training rows. Raises ValueError as check_own_answers does."""
    rows = dataset.rows(config)
    check_own_answers(name, config.source, ((number, rows[number]) for number in dataset.part_rows(config)))


def check_there(config: RewardConfig, data: DataConfig) -> None:
    """Check that what a user's own reward or a rubric takes of the rows is there: answers in each source, and columns of TRL's form.

    Raises:
        ValueError: for a source of which no row has an answer, or a column that none has; names the columns that there are.
    """
    for function in config.called:
        if function.name == by_model.RUBRIC and rubric.takes_answer(rubric.text_of(config.judge)):
            _check_answered("reward.judge.rubric uses {answer}", "use {row[COLUMN]}", data)
        elif function.name not in NAMES:
            form = client.form_of(config, function, source_digest(function.name))
            _check_columns(function.name, form, data)
            if form.needs_answer:
                who, default = f"reward {function.name!r} takes {ANSWER[form.kind]!r}", f"{ANSWER[form.kind]}=''"
                in_row = form.kind == "verl"  # which looks there first
                _check_answered(who, f"give the parameter a default, such as {default}", data, in_row=in_row)


def _check_answered(who: str, else_do: str, data: DataConfig, *, in_row: bool = False) -> None:
    """in_row: Whether an answer may also be a row's reward_model."""
    for source in data.parts or (data,):
        rows = dataset.rows(source)
        if not any(row.answer or (in_row and row.columns.get("reward_model")) for row in rows):
            raise ValueError(
                f"{who}, and none of the {len(rows)} rows of data set {source.source!r} has an answer: name their column with "
                f"data.answer_column (there are {', '.join(rows[0].columns)}), or {else_do}"
            )


def _check_columns(name: str, form: Form, data: DataConfig) -> None:
    if needed := form.needs_columns:
        there = dict.fromkeys(column for row in dataset.rows(data) for column in row.columns)
        if missing := [each for each in needed if each not in there]:
            raise ValueError(
                f"reward {name!r} takes {missing[0]!r}, and data set {data.source!r} has no such column; it has {', '.join(there)}"
            )


def check_own_answers(name: str, source: str, rows: Iterable[tuple[int, Row]]) -> None:
    """Check rows by a built-in reward. Those for GSM8K score each row's own final answer, in the form `#### answer`; the others look at
    what the row gives them. A user's own rewards are not checked.

    rows: Rows with their numbers in the data set.

    Raises:
        ValueError: for answers that do not score 1, since no completion could either; with counts and the first three rows. For a row by
            which nothing can be judged.
    """
    if name in built_in.PLACES:
        _check_rows(name, source, rows)
    if name not in BUILT_IN:
        return
    num_rows, wrong, answered, columns = 0, [], False, dict[str, None]()
    for number, row in rows:
        num_rows += 1
        answered |= bool(row.answer)
        columns |= dict.fromkeys(row.columns)
        if _of_own_answer(RewardFunction(name=name), row.question, row.answer).reward != 1.0:
            wrong.append(f"row {number} {gsm8k.ground_truth(row.answer)[-60:]!r}")
    if wrong and not answered:
        raise ValueError(
            f"reward {name!r} needs answers, and none of the {num_rows} rows of data set {source!r} has one: name their column with "
            f"data.answer_column; there are {', '.join(columns)}"
        )
    if wrong:
        shown = ", ".join([*wrong[:NUM_SHOWN], *(["..."] if len(wrong) > NUM_SHOWN else [])])
        raise ValueError(
            f"reward {name!r} gives {len(wrong)} of {num_rows} rows of data set {source!r} less than 1 for their own answers: {shown}: "
            "make each answer a number, or a solution that ends in '#### 42', or choose another reward"
        )


def _check_rows(name: str, source: str, rows: Iterable[tuple[int, Row]]) -> None:
    reward = built_in.made(name)
    for number, row in rows:
        try:
            reward.check_row(row.answer, row.columns)
        except ValueError as error:
            raise ValueError(f"reward {name!r} cannot judge by row {number} of data set {source!r}: {error}") from error
