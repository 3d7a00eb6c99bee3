"""From rows to token ids: each question in the model's chat template, tokenized once and never again."""

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from infra.config import DataConfig, DataPart
from infra.data import dataset, prompt_text
from infra.data.forms import curriculum, mixing
from infra.data.forms.curriculum import PassRates
from infra.data.forms.row import Message, Row
from infra.data.json_values import JSON
from infra.models import base_model
from infra.records import RowCounts

log = logging.getLogger(__name__)

NO_RATES: PassRates = {}

NUM_AT_A_TIME = 1024
"""Prompts that are tokenized together; what a tokenizer gives besides the tokens takes room."""
NUM_COMPARED = 8
"""Different questions whose prompts must not all be equal."""


class Prompt(NamedTuple):
    prompt_id: int
    """Position in the run's endless sequence of prompts: unique in the run."""
    row_number: int
    """Number of the row in the data set, from 0."""
    question: str
    answer: str
    prompt_tokens: list[int]
    seed: int
    """Seed of all samples of this prompt; see sample_seed."""
    row: dict[str, JSON] = {}  # noqa: RUF012  # of a tuple
    """All columns of the data set's row, as they are."""
    messages: list[Message] | None = None
    """Of a prompt of several messages: those that it was made of, without an instruction. None: the question is the only one."""

    def to_json(self) -> dict[str, Any]:
        """Return a line of prompts.jsonl."""
        return {name: value for name, value in self._asdict().items() if name != "messages" or value is not None}


def sample_seed(prompt_seed: int, sample_index: int, num_begun: int = 0) -> int:
    """A seed of its own for each sample: equal seeds in one group would give equal samples.

    num_begun: Output tokens of the prefix of a partial sample. The rest needs another seed, so that it does not repeat the random
        numbers of its prefix.
    """
    return _derive(prompt_seed, sample_index, *([num_begun] if num_begun else []))


def place_of(config: DataConfig, step: int, draw: int) -> int:
    """Position of a draw in the run's sequence of draws: each step has max_draws of them, made or not, so that the prompts of a step do not depend
    on how many draws the steps before it needed.

    draw: From 1; 0 where a step has one.
    """
    return step * config.max_draws + max(0, draw - 1)


def draw(
    config: DataConfig, model_folder: Path, *, step: int, seed: int, goes_on: bool = False, rates: PassRates = NO_RATES
) -> list[Prompt]:
    """Draw the prompts of one step, over-sampled ones included.

    step: Number of the step, or with dynamic sampling its place_of.
    goes_on: With partial rollouts: groups carried over from the step before take the place of over-sampled prompts.
    rates: With a curriculum: the pass rates that are known at that step.

    Raises:
        ValueError: for a prompt of more than max_prompt_tokens where config.too_long says so, or for too few rows.
    """
    numbers, first = _row_numbers(config, _usable_rows(config, model_folder), step=step, seed=seed, goes_on=goes_on, rates=rates)
    rows = dataset.rows(config)
    tokens = [_cut(found, config) for found in all_tokenized(config, model_folder, [rows[number] for number in numbers])]
    return [
        _checked(_prompt_of(prompt_id, number, rows[number], prompt_tokens, _derive(seed, prompt_id)), config)
        for prompt_id, (number, prompt_tokens) in enumerate(zip(numbers, tokens, strict=True), start=first)
    ]


def _prompt_of(prompt_id: int, number: int, row: Row, tokens: list[int], seed: int) -> Prompt:
    return Prompt(prompt_id, number, row.question, row.answer, tokens, seed, row.columns, row.chat.messages if row.chat else None)


def _cut(tokens: list[int], config: DataConfig) -> list[int]:
    return tokens[-config.max_prompt_tokens :] if config.too_long == "truncate_left" else tokens


def _row_numbers(
    config: DataConfig, usable: Sequence[int], *, step: int, seed: int, goes_on: bool, rates: PassRates = NO_RATES
) -> tuple[list[int], int]:
    """The rows of a step's prompts, and the position of the first in the run's sequence."""
    count, first = _places(config, step, goes_on=goes_on)
    if config.curriculum != "none":
        _check_choice(config, len(usable))
        index, number = divmod(step, config.max_draws)
        return curriculum.ordered(config, usable, rates, step=index, seed=seed)[number * count : (number + 1) * count], first
    if _is_mixed(config):
        size = None if config.allow_repeats else _window_of(config).size
        return mixing.numbers_at(config, usable, first, count, seed, size), first
    window = None if config.allow_repeats else _window(config, len(usable))
    return [usable[number] for number in dataset.order(len(usable), first, count, seed, window)], first


def _is_mixed(config: DataConfig) -> bool:
    """Whether the prompts of several sources are mixed by weight. Rows held out for evaluations keep one order."""
    return bool(config.sources) and getattr(config, "part", "all") != "held_out"


def _window_of(config: DataConfig) -> dataset.Window:
    """The prompts of a step: its own and, with partial rollouts, those of groups carried over from the step before."""
    num, spare = config.num_prompts, config.num_oversampled_prompts
    if config.partial_rollouts:
        return dataset.Window(2 * num + spare, is_aligned=False)
    return dataset.Window((num + spare) * config.max_draws)


def _window(config: DataConfig, num_usable: int) -> dataset.Window:
    """The window of one source.

    Raises:
        ValueError: for too few rows to fill it without one row twice.
    """
    num, spare, window = config.num_prompts, config.num_oversampled_prompts, _window_of(config)
    if num_usable < window.min_rows:
        fields = f"data.num_prompts {num}" + (f", data.num_oversampled_prompts {spare}" if spare else "")
        of_draws = f", data.max_draws {config.max_draws}" if config.max_draws > 1 else ""
        num_left_out = len(dataset.rows(config)) - len(dataset.part_rows(config))
        rest = f", beside the {num_left_out} that are left for evaluations," if num_left_out else ""
        raise ValueError(
            f"data set {config.source!r} has {num_usable} usable {'row' if num_usable == 1 else 'rows'}{rest} for the {window.size} prompts of a step"
            f"{' and the one before' if config.partial_rollouts else ''} ({fields}{of_draws}): a step would hold the same row several times. "
            f"Lower data.num_prompts, take {window.min_rows} or more rows, or set data.allow_repeats"
        )
    return window


def _check_choice(config: DataConfig, num_usable: int) -> None:
    """Raises ValueError for a data set that leaves a curriculum nothing to choose from."""
    size = _window(config, num_usable).size
    if num_usable == size:
        raise ValueError(
            f"data.curriculum {config.curriculum!r} with {num_usable} usable rows of data set {config.source!r}: a step draws all {size} of them, "
            "so there is nothing to choose; add rows, lower data.num_prompts, or set it to 'none'"
        )


def _places(config: DataConfig, step: int, *, goes_on: bool) -> tuple[int, int]:
    """The number of prompts, and the position of the first."""
    num, spare = config.num_prompts, config.num_oversampled_prompts
    if not config.partial_rollouts:
        return num + spare, step * (num + spare)
    return (num, step * num + spare) if goes_on else (num + spare, step * num)


def held_out(config: DataConfig, model_folder: Path) -> list[Prompt]:
    """num_prompts of a held-out set, or all where there are fewer: the same ones for every run.

    Raises:
        ValueError: as draw does.
    """
    num = min(config.num_prompts, len(_usable_rows(config, model_folder)))
    one: dict[str, object] = {"num_oversampled_prompts": 0, "partial_rollouts": False, "max_draws": 1}
    one |= {"curriculum": "none", "pass_rate_between": None}
    return draw(config.but(num_prompts=num, **one), model_folder, step=0, seed=0)


def tokenized(config: DataConfig, model_folder: Path, question: str) -> list[int]:
    """The question in the template, with the opening of the assistant's turn behind it."""
    (tokens,) = all_tokenized(config, model_folder, [Row(question, "")])
    return tokens


# Perf: 64 prompts drawn in 17 ms of CPU time instead of 26 ms, 1,024 at a time instead of one (docs/results/step-tail.md).
def all_tokenized(config: DataConfig, model_folder: Path, rows: Sequence[Row]) -> list[list[int]]:
    """Many at a time, which takes two fifths of the time. Where there is no template the tokenizer adds its own special tokens."""
    tokenizer = base_model.tokenizer(model_folder)
    found: list[list[int]] = []
    for begin in range(0, len(rows), NUM_AT_A_TIME):
        texts = prompt_text.texts_of(config, model_folder, tokenizer, rows[begin : begin + NUM_AT_A_TIME])
        found += tokenizer(texts, add_special_tokens=config.template == "raw")["input_ids"]
    return [[int(token) for token in tokens] for tokens in found]


def _derive(*parts: int) -> int:
    """A seed of 31 bits from others."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4]) >> 1


@cache
def _usable_rows(config: DataConfig, model_folder: Path) -> tuple[int, ...]:
    numbers = dataset.part_rows(config)
    if config.too_long != "drop":
        return numbers
    long = frozenset(long_rows(config, model_folder))
    short = tuple(number for number in numbers if number not in long)
    if not short:
        raise ValueError(
            f"no prompt of {config.source!r} has {config.max_prompt_tokens} tokens or fewer (data.max_prompt_tokens)"
        )
    return short


@cache
def long_rows(config: DataConfig, model_folder: Path) -> tuple[int, ...]:
    """The rows whose prompts have more than max_prompt_tokens."""
    rows, numbers = dataset.rows(config), _doubtful(config, model_folder)
    lengths = map(len, all_tokenized(config, model_folder, [rows[number] for number in numbers]))
    return tuple(number for number, length in zip(numbers, lengths, strict=True) if length > config.max_prompt_tokens)


@cache
def check_lengths(config: DataConfig, model_folder: Path) -> None:
    """Raises ValueError where config.too_long forbids prompts of more than max_prompt_tokens and the data set has one, whenever it would be
    drawn: a run that meets it in its hundredth step could not go on, what it is made from may not change; and where no question is in its
    prompt."""
    _check_questions(config, model_folder)
    if config.too_long == "error" and (long := long_rows(config, model_folder)):
        rows = dataset.rows(config)
        lengths = list(map(len, all_tokenized(config, model_folder, [rows[number] for number in long])))
        longest = max(zip(lengths, long, strict=True))
        raise ValueError(
            f"{len(long)} of {len(dataset.part_rows(config))} prompts of {config.source!r} have more tokens than data.max_prompt_tokens "
            f"{config.max_prompt_tokens}, that of row {longest[1]} has {longest[0]}: raise it, or set data.too_long to 'drop' or 'truncate_left'"
        )


def _check_questions(config: DataConfig, model_folder: Path) -> None:
    """Raises ValueError for a template that leaves out what it should show: the model would answer, and be trained, without a question."""
    rows = dataset.rows(config)
    by_text = {rows[number].text: rows[number] for number in dataset.part_rows(config)[:NUM_AT_A_TIME]}
    asked = list(by_text.values())[:NUM_COMPARED]
    made = all_tokenized(config, model_folder, asked)
    if len(asked) > 1 and all(prompt == made[0] for prompt in made):
        raise ValueError(
            f"data.template {str(config.template)!r} with model folder {model_folder} makes one and the same prompt of different questions, such "
            f"as {asked[0].question[:60]!r} and {asked[1].question[:60]!r}: have the template show the messages' content"
        )


def _doubtful(config: DataConfig, model_folder: Path) -> Sequence[int]:
    """The rows that have to be tokenized to know that they are short enough: those of many characters, and all chats and file templates."""
    rows, numbers = dataset.rows(config), dataset.part_rows(config)
    if config.template_file or any(rows[number].chat for number in numbers):
        return numbers
    around = len(tokenized(config, model_folder, "")) + 2  # a blank before the instruction, and what a tokenizer may put in front
    return [number for number in numbers if len(rows[number].question.encode()) + around > config.max_prompt_tokens]


@cache
def check_repeats(config: DataConfig, model_folder: Path, *, num_steps: int, seed: int) -> None:
    """Warn of rows with equal text, and look for repeats in the steps of a run before the first is made.

    Texts that differ in case and blanks only are equal here.

    Raises:
        ValueError: unless data.allow_repeats, where a step would hold one row twice, or one text in more than half of its prompts.
    """
    usable, rows = _usable_rows(config, model_folder), dataset.rows(config)
    counts = Counter(dataset.question_digest(rows[number].text) for number in usable)
    ((commonest, num_commonest),) = counts.most_common(1)
    if len(counts) < len(usable):
        example = next(rows[number].question for number in usable if dataset.question_digest(rows[number].text) == commonest)
        log.warning(
            "%d of %d rows of data set %r repeat the text of another row (%d times %r)",
            *(len(usable) - len(counts), len(usable), config.source, num_commonest, example[:60]),
        )
    if config.allow_repeats:
        return
    _row_numbers(config, usable, step=0, seed=seed, goes_on=False)  # which refuses too few rows
    if 2 * num_commonest <= config.num_prompts:
        return
    if config.curriculum != "none":
        raise ValueError(
            f"data.curriculum {config.curriculum!r} with data set {config.source!r}, where {num_commonest} rows have equal text: they could be more "
            f"than half of a step's {config.num_prompts} prompts. Take the copies out of the data set, or set it to 'none'"
        )
    for step in range(num_steps * config.max_draws):
        numbers, _ = _row_numbers(config, usable, step=step, seed=seed, goes_on=config.partial_rollouts and step > 0)
        check_step(config, numbers, step // config.max_draws)


def check_step(config: DataConfig, numbers: Sequence[int], step: int) -> None:
    """Raises ValueError, unless data.allow_repeats, where of a step's rows one is there twice, or one text in more than half."""
    if config.allow_repeats:
        return
    rows = dataset.rows(config)
    about = f"step {step} would have {len(numbers)} prompts of data set {config.source!r}"
    if num_again := len(numbers) - len(set(numbers)):
        raise ValueError(f"{about}, {num_again} of them of a row that is there already: set data.allow_repeats, or add rows")
    ((digest, most),) = Counter(dataset.question_digest(rows[number].text) for number in numbers).most_common(1)
    if most > 1 and 2 * most > len(numbers):
        example = next(rows[number].question for number in numbers if dataset.question_digest(rows[number].text) == digest)
        raise ValueError(
            f"{about}, {most} of them with equal text ({example[:60]!r}): take the copies out of the data set, or set data.allow_repeats"
        )


def _checked(prompt: Prompt, config: DataConfig) -> Prompt:
    if len(prompt.prompt_tokens) > config.max_prompt_tokens:
        raise ValueError(
            f"prompt {prompt.prompt_id} of {config.source!r} has {len(prompt.prompt_tokens)} tokens, data.max_prompt_tokens is "
            f"{config.max_prompt_tokens}: raise it, or set data.too_long to 'drop' or 'truncate_left'"
        )
    return prompt


def counts_of(config: DataConfig, model_folder: Path) -> RowCounts:
    """Count what became of a data set's rows."""
    part = DataPart.model_validate(dict(config))
    return RowCounts(
        num_rows=len(dataset.rows(config)),
        num_filtered=dataset.loaded(config).num_filtered,
        num_held_out=len(dataset.held_out_rows(part)),
        num_contaminated=len(dataset.contaminated_rows(part)),
        num_too_long=0 if config.too_long == "error" else len(long_rows(config, model_folder)),
        num_sharing_13_words=dataset.num_sharing_a_passage(part),
    )


def num_overlapping(asked: Sequence[Prompt], asked_from: DataConfig, training: DataConfig) -> int:
    """Questions that are in the training set too."""
    known, rows = dataset.question_digests(training), dataset.rows(asked_from)
    return sum(dataset.question_digest(rows[prompt.row_number].text) in known for prompt in asked)
