"""What is made of the trainer's lines."""

import logging

import pytest
import torch

from infra.megatron.__main__ import OutputFormatter
from infra.megatron.program import train_step
from infra.progress.work import Work
from infra.trainers import log_parser


def progress_of_log(*lines: str) -> Work:
    work = Work(log_parser.TRAINING, note=log_parser.STARTING)
    for line in lines:
        log_parser.on_log_line(line, work)
    return work


def test_micro_batches_are_counted_and_stay_in_the_trainers_log(caplog: pytest.LogCaptureFixture) -> None:
    lines = [f"micro-batch {number}/800  4096 tokens  loss -0.500000" for number in range(1, 801)]
    with caplog.at_level(logging.INFO, "infra"):
        work = progress_of_log(*lines[:600])
        assert (work.what, work.done, work.total, work.note) == ("training", 600, 800, "loss -0.500000")
        for line in lines[600:]:
            log_parser.on_log_line(line, work)
    assert (work.done, caplog.records) == (800, [])


def test_mini_batches_count_with_the_part_of_them_that_is_done() -> None:
    work = progress_of_log("micro-batch 3/4 1/2  100 tokens  loss +0.1")
    assert (work.done, work.total, work.unit) == (2.5, 4, "mini-batches")


def test_loading_is_counted_in_gib() -> None:
    work = progress_of_log("loaded 3.5 of 14.2 GiB")
    assert (work.what, work.done, work.total, work.unit) == ("loading weights", 3.5, 14.2, "GiB")
    log_parser.on_log_line("micro-batch 1/2  10 tokens  loss +0.1", work)
    assert (work.what, work.fraction) == ("training", 0.5)


def test_warnings_and_errors_of_the_trainer_come_through(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infra"):
        progress_of_log("build  1.2 s", "WARNING: the host's memory could not be page-locked", "error: the loss is nan")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "trainer: WARNING: the host's memory could not be page-locked"),
        ("ERROR", "trainer: error: the loss is nan"),
    ]


def test_the_trainer_program_writes_the_level_of_its_warnings() -> None:
    record = logging.makeLogRecord({"msg": "build", "levelno": logging.INFO, "levelname": "INFO"})
    warning = logging.makeLogRecord({"msg": "slow", "levelno": logging.WARNING, "levelname": "WARNING"})
    assert [OutputFormatter().format(each) for each in (record, warning)] == ["build", "WARNING: slow"]


def test_the_trainer_speaks_as_it_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    said = train_step.Progress()
    with caplog.at_level(logging.INFO, "infra"):
        said.tell(f"micro-batch {train_step._place(1, 2, [[[0]], [[1], [2], [3], [4]]])}  17 tokens", torch.tensor(0.25))
        said.finish()
    work = progress_of_log(caplog.records[-1].getMessage())
    assert (work.what, work.done, work.total, work.note) == ("training", 1.75, 2, "loss +0.250000")
