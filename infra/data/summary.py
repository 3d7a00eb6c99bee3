"""Summary of a run's data: numbers of rows, of repeated and of held-out questions, and lengths."""

from collections import Counter
from pathlib import Path
from statistics import median
from typing import NamedTuple

from infra.config import RunConfig
from infra.data import dataset, prompts
from infra.records import RowCounts


class DataSummary(NamedTuple):
    layout: str
    """What was recognised of the source, in one line."""
    num_rows: int
    """Rows of the source."""
    counts: RowCounts
    """What became of the others."""
    num_training: int
    """Rows that are trained on."""
    num_too_long: int
    """Number of these whose prompt has more than data.max_prompt_tokens."""
    shortest: int
    median: float
    longest: int
    """Tokens of a prompt, template included."""
    num_repeated: int
    """Rows whose question another row has too; case and blanks do not count."""
    num_held_out: int
    """Questions that evaluations ask, of all sets; 0 where there are none."""
    num_overlapping: int
    """Number of these that are in the training data too."""


def summary_of(config: RunConfig, model_folder: Path) -> DataSummary:
    """Summarize all rows.

    Raises:
        ValueError: for a source that cannot be read.
    """
    training = config.training
    rows, numbers = dataset.rows(training), dataset.part_rows(training)
    lengths = list(map(len, prompts.all_tokenized(training, model_folder, [rows[number] for number in numbers])))
    counts = Counter(dataset.question_digest(rows[number].text) for number in numbers)
    sets = [each.data for each in config.eval_configs.values() if not each.inspect] if config.evaluation.every else []
    asked = [(data, prompts.held_out(data, model_folder)) for data in sets]
    return DataSummary(
        layout=dataset.loaded(training).layout,
        num_rows=len(rows),
        counts=prompts.counts_of(training, model_folder),
        num_training=len(numbers),
        num_too_long=sum(length > training.max_prompt_tokens for length in lengths),
        shortest=min(lengths),
        median=median(lengths),
        longest=max(lengths),
        num_repeated=len(numbers) - len(counts),
        num_held_out=sum(len(questions) for _, questions in asked),
        num_overlapping=sum(prompts.num_overlapping(questions, data, training) for data, questions in asked),
    )
