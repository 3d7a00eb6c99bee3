"""What one process writes while another one reads: the reader sees the old content or the new one, never a part of one."""

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from shared import sample

from infra.mirror.remote import Remote
from infra.settings import CHECKOUT
from infra.store import files
from infra.store.samples import Sample, read_samples, write_samples
from infra.trajectories.spans import SegmentSpan

OLD, NEW = {"is": [1]}, {"is": [2] * 20_000}
"""Of unlike sizes: a part of the longer one is neither of them."""
SAMPLES = [
    [replace(sample(4), text="old")],
    [
        replace(sample(5), text="new" * 1000, sample_index=index, segments=(SegmentSpan("given", 1), SegmentSpan("given", 1)))
        for index in range(300)
    ],
]
"""The files differ in their columns, too."""
WRITER = """
import json, sys, time
from pathlib import Path
sys.path[:0] = json.loads(sys.argv[3])
from test_second_process import CONTENTS, WRITERS
write, path = WRITERS[sys.argv[1]], Path(sys.argv[2])
print("ready", flush=True)
while True:
    for content in CONTENTS[sys.argv[1]]:
        write(path, content)
"""
MIN_READS, MIN_CHANGES, LIMIT_S = 100, 20, 60.0


def stored(path: Path) -> tuple[Remote, str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return Remote(str(path.parent)), path.name


def data_of(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def record_of(path: Path) -> tuple[str, int]:
    record = files.record_of(path)
    return record.sha256, record.num_bytes


def rows(value: dict[str, list[int]]) -> list[dict[str, Any]]:
    return [{"is": number} for number in value["is"]]


WRITERS: dict[str, Callable[[Path, Any], object]] = {
    "record": lambda path, value: files.write_json(path, value),
    "note": files.write_note,
    "lines": lambda path, value: files.write_json_lines(path, rows(value), syncs=False),
    "file's record": lambda path, value: files.write_json(path, value, syncs=False),
    "secret": lambda path, value: files.write_secret(path, SecretStr(json.dumps(value))),
    "samples": write_samples,
    "folder that is a store": lambda path, value: stored(path)[0].replace(path.name, data_of(value)),
}
READERS: dict[str, Callable[[Path], Any]] = {
    "record": lambda path: files.read_record(path, dict[str, list[int]], cure="no"),
    "note": lambda path: files.read_note(path, dict[str, list[int]]),
    "lines": files.read_json_lines,
    "file's record": record_of,
    "secret": lambda path: files.read_secret(path).get_secret_value(),
    "samples": read_samples,
    "folder that is a store": lambda path: stored(path)[0].read(path.name),
}
CONTENTS: dict[str, list[Any]] = {name: SAMPLES if name == "samples" else [OLD, NEW] for name in WRITERS}


def seen_as(name: str, content: Any) -> Any:
    """What the reader gives for a content that was written."""
    match name:
        case "lines":
            return rows(content)
        case "file's record":
            return hashlib.sha256(data_of(content)).hexdigest(), len(data_of(content))
        case "secret":
            return json.dumps(content)
        case "folder that is a store":
            return data_of(content)
    return content


@pytest.fixture
def written_by(workspace: Path) -> Iterator[Callable[[str, Path], "subprocess.Popen[str]"]]:
    """Starts a process that writes a file again and again."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str, path: Path) -> "subprocess.Popen[str]":
        places = json.dumps([str(CHECKOUT), str(CHECKOUT / "tests"), str(Path(__file__).parent)])
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, name, str(path), places],
            env=os.environ | {"RATCHET_WORKSPACE": str(workspace)},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(writer)
        assert writer.stdout and writer.stdout.readline() == "ready\n"
        return writer

    yield start
    for writer in started:
        writer.kill()
        writer.wait()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", WRITERS)
def test_what_another_process_writes_is_read_as_it_was_or_as_it_is(
    name: str, workspace: Path, written_by: Callable[[str, Path], "subprocess.Popen[str]"]
) -> None:
    path, read = workspace / "folder/file", READERS[name]
    WRITERS[name](path, CONTENTS[name][0])
    whole: list[Any] = [seen_as(name, content) for content in CONTENTS[name]]
    writer = written_by(name, path)
    seen: list[int] = []
    deadline = time.monotonic() + LIMIT_S
    while len(seen) < MIN_READS or sum(a != b for a, b in itertools.pairwise(seen)) < MIN_CHANGES:
        found = read(path)
        assert found in whole, "a part of a file, or of two"
        seen.append(whole.index(found))
        if time.monotonic() > deadline and len(set(seen)) == 2:
            break  # a busy machine
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    assert read(path) in whole, "the writer was killed"


def test_the_samples_are_of_two_kinds() -> None:
    assert [each.segments != () for each in SAMPLES[0] + SAMPLES[1][:1]] == [False, True]
    assert isinstance(SAMPLES[0][0], Sample)
