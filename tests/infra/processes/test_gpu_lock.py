import fcntl
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from shared import becomes, is_gone

from infra.concurrency.prefetch import Prefetch
from infra.processes import children, gpu_lock, gpu_programs, lock_folder, private_folder
from infra.processes.children import ProcessRef
from infra.settings import settings
from infra.store.files import write_json

TAKE_LOCK = "import sys, time; from infra.processes.gpu_lock import gpu_lock\nwith gpu_lock(sys.argv[1]): print('mine', flush=True); time.sleep(99)"
HIDDEN_GRANDCHILD = "setsid bash -c 'exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; sleep 300' & echo $!; wait"
"""In a session of its own, and without the descriptor that its parent inherited, as torchrun's and SGLang's children are."""


def notes() -> list[Path]:
    return sorted((lock_folder.programs()).glob("*"))


@pytest.fixture(autouse=True)
def _workspace(workspace: Path) -> None:
    pass


@pytest.fixture
def other_owner(workspace: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Another process that takes the lock; it has it when this returns."""
    started = []

    def take(who: str) -> "subprocess.Popen[str]":
        child = subprocess.Popen([sys.executable, "-c", TAKE_LOCK, who], stdout=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "mine\n"
        return child

    yield take
    for child in started:
        child.kill()
        child.communicate()


@pytest.fixture
def start(workspace: Path) -> Iterator[Callable[[str], ProcessRef]]:
    """An engine of this workspace that runs a script; engine.json does not name it."""
    started: list[ProcessRef] = []

    def begin(script: str) -> ProcessRef:
        state_file = workspace / "engine.json"
        started.append(gpu_programs.start("engine", ["bash", "-c", script], workspace / "log", {}, state_file=state_file))
        return started[-1]

    yield begin
    for ref in started:
        children.stop(ref, grace_s=0.1)


def name_in(state_file: Path, ref: ProcessRef) -> None:
    write_json(state_file, {"process": ref.model_dump(mode="json")})


def test_a_second_owner_waits_says_for_whom_and_goes_on_when_the_first_is_killed(
    other_owner: Callable[[str], "subprocess.Popen[str]"], caplog: pytest.LogCaptureFixture
) -> None:
    first = other_owner("run first")
    threading.Timer(1.0, first.kill).start()
    begun = time.monotonic()
    with gpu_lock.gpu_lock("run second"):
        assert time.monotonic() - begun > 0.8
    assert f"held by run first of workspace {settings().workspace} (pid {first.pid}, " in caplog.text


def test_a_holder_that_ends_while_it_is_described_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"])
    process = psutil.Process(child.pid)
    holder = gpu_lock.Holder(who="a run", workspace=Path("w"), process=children.ref_of(child.pid), since="now")
    assert "ended" not in str(holder)
    child.kill()
    child.wait()
    monkeypatch.setattr(children, "find", lambda ref: process)  # as it was a moment ago
    assert f"pid {child.pid}, ended" in str(holder)


def test_a_lock_within_a_lock_is_the_same_lock() -> None:
    with gpu_lock.gpu_lock("run"), gpu_lock.gpu_lock("its step"):
        pass
    with lock_folder.lock_path().open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again


def test_what_was_checked_before_waiting_is_checked_again_after_a_wait_only(
    other_owner: Callable[[str], "subprocess.Popen[str]"],
) -> None:
    calls: list[float] = []

    def preflight() -> None:
        calls.append(time.monotonic())

    with gpu_lock.gpu_lock("run", preflight):
        assert len(calls) == 1
        with gpu_lock.gpu_lock("its step", preflight):
            assert len(calls) == 2, "a step of a run has a check of its own"
    first = other_owner("run first")
    threading.Timer(1.0, first.kill).start()
    calls.clear()
    with gpu_lock.gpu_lock("run second", preflight):
        before, after = calls
    assert after - before > 0.8


def test_a_check_that_fails_waits_for_nobody_and_frees_the_lock(other_owner: Callable[[str], "subprocess.Popen[str]"]) -> None:
    calls: list[int] = []

    def fail_at(number: int) -> None:
        calls.append(len(calls) + 1)
        if len(calls) == number:
            raise ValueError("it cannot work")

    first = other_owner("run first")
    with pytest.raises(ValueError, match="it cannot work"), gpu_lock.gpu_lock("run second", lambda: fail_at(1)):
        raise AssertionError
    threading.Timer(0.5, first.kill).start()
    calls.clear()
    with pytest.raises(ValueError, match="it cannot work"), gpu_lock.gpu_lock("run third", lambda: fail_at(2)):
        raise AssertionError
    with lock_folder.lock_path().open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again


def test_work_that_a_cancelled_run_has_left_in_a_thread_keeps_the_lock_until_it_ends(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    order: list[str] = []
    may_end = threading.Event()

    def rollout() -> None:
        assert may_end.wait(60)
        lock_folder.check_held()  # as before it starts a program
        order.append("rollout")

    with pytest.raises(KeyboardInterrupt), gpu_lock.gpu_lock("cancelled"), Prefetch() as prefetch:
        prefetch.start(workspace / "a step", gpu_lock.keeps_lock(rollout))
        raise KeyboardInterrupt
    with lock_folder.lock_path().open() as stream, pytest.raises(BlockingIOError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as another process would
    threading.Timer(0.3, may_end.set).start()
    with gpu_lock.gpu_lock("next"):
        order.append("next")
    assert order == ["rollout", "next"]
    assert "held by an owner that is just beginning or ending, or work that a cancelled one has left in a thread" in caplog.text


def test_work_that_keeps_the_lock_frees_it_when_it_fails_and_needs_none() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    assert gpu_lock.keeps_lock(fail) is fail
    with gpu_lock.gpu_lock("run"), pytest.raises(ZeroDivisionError):
        gpu_lock.keeps_lock(fail)()
    with lock_folder.lock_path().open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again


def test_a_turn_whose_file_was_taken_away_meanwhile_is_taken_at_the_one_that_counts() -> None:
    taken, order = lock_folder.lock_path(), list[str]()

    def take() -> None:
        with gpu_lock.gpu_lock("thread"):
            order.append("thread")

    with gpu_lock.gpu_lock("first"):
        thread = threading.Thread(target=take)
        thread.start()
        time.sleep(3 * lock_folder.POLL_S)  # it waits at the file of the first
        taken.unlink()
        second = taken.open("a+")
        fcntl.flock(second, fcntl.LOCK_EX)
    thread.join(timeout=1)
    assert not order, "somebody else has the file that counts"
    second.close()
    thread.join(timeout=20)
    assert order == ["thread"]


def test_another_thread_of_the_same_process_waits_like_anybody_else() -> None:
    order = []

    def take() -> None:
        with gpu_lock.gpu_lock("thread"):
            order.append("thread")

    thread = threading.Thread(target=take)
    with gpu_lock.gpu_lock("run"):
        thread.start()
        thread.join(timeout=1)
        order.append("run")
    thread.join(timeout=20)
    assert order == ["run", "thread"]


def test_children_do_not_inherit_the_lock() -> None:
    with gpu_lock.gpu_lock("run"):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    with gpu_lock.gpu_lock("next"):
        child.kill()
    child.wait()


def test_a_program_holds_its_lock_until_its_last_process_is_gone(start: Callable[[str], ProcessRef], workspace: Path) -> None:
    ref = start("sleep 300 & echo $!; wait")
    assert becomes(lambda: (workspace / "log").read_text().strip() != "")
    (note,) = notes()
    program = gpu_programs.Program.model_validate_json(note.read_text())
    root = children.find(ref)
    assert root is not None
    root.kill()
    assert becomes(lambda: children.find(ref) is None)
    with note.open() as stream, pytest.raises(BlockingIOError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    children.stop_program(program.id)
    with note.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_a_killed_owner_left_is_ended_by_the_next_even_where_it_let_go_of_the_lock(
    start: Callable[[str], ProcessRef], workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ref = start(HIDDEN_GRANDCHILD)
    assert becomes(lambda: (workspace / "log").read_text().strip() != "")
    grandchild = int((workspace / "log").read_text())
    root = children.find(ref)
    assert root is not None
    root.kill()
    assert not is_gone(grandchild)
    with gpu_lock.gpu_lock("next"):
        assert is_gone(grandchild)
        assert notes() == []
    assert "ending the engine that an earlier owner" in caplog.text


def test_an_engine_that_its_workspace_will_adopt_is_no_leftover(start: Callable[[str], ProcessRef], workspace: Path) -> None:
    expected, forgotten = start("sleep 300"), start("sleep 300")
    name_in(workspace / "engine.json", expected)
    with gpu_lock.gpu_lock("next"):
        assert children.find(expected)
        assert children.find(forgotten) is None
    gpu_programs.stop(expected)
    assert notes() == []


def test_an_engine_whose_state_file_is_lost_is_a_leftover(start: Callable[[str], ProcessRef], workspace: Path) -> None:
    ref = start("sleep 300")
    (workspace / "engine.json").write_bytes(b"")
    with gpu_lock.gpu_lock("next"):
        assert children.find(ref) is None


def test_the_idle_engine_of_another_workspace_makes_room(
    start: Callable[[str], ProcessRef], workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_LOCK_FOLDER", str(tmp_path / "shared"))
    settings.cache_clear()
    ref = start("sleep 300")
    name_in(workspace / "engine.json", ref)
    monkeypatch.setenv("RATCHET_WORKSPACE", str(tmp_path / "another"))
    settings.cache_clear()
    with gpu_lock.gpu_lock("the other"):
        assert children.find(ref) is None


def test_a_note_that_is_taken_away_meanwhile_is_of_a_program_that_has_ended(
    start: Callable[[str], ProcessRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, read = start("sleep 300"), gpu_programs._noted

    def vanishing() -> list[gpu_programs.Program]:
        found = read()
        gpu_programs.stop(ref)
        return found

    monkeypatch.setattr(gpu_programs, "_noted", vanishing)
    with gpu_lock.gpu_lock("next"):
        assert children.find(ref) is None and notes() == []


def test_a_note_that_was_never_finished_stands_in_nobodys_way(start: Callable[[str], ProcessRef]) -> None:
    start("sleep 300")
    (notes()[0].parent / "0123.77-88.partial").write_text("")  # whoever wrote it was killed
    with gpu_lock.gpu_lock("next"):
        assert gpu_programs.programs() == [] and gpu_programs.running_without_state() is None


def test_a_holder_that_cannot_be_seen_is_waited_for(start: Callable[[str], ProcessRef], caplog: pytest.LogCaptureFixture) -> None:
    ref = start("exec env -u RATCHET_PROGRAM sleep 300")
    assert becomes(lambda: not children.members(ref.program))
    root = children.find(ref)
    assert root is not None
    threading.Timer(1.0, root.kill).start()
    begun = time.monotonic()
    with gpu_lock.gpu_lock("next"):
        assert time.monotonic() - begun > 0.8
    assert "its lock is held by a process that cannot be seen here" in caplog.text


def test_a_program_that_ran_to_its_end_leaves_no_note(workspace: Path) -> None:
    lines: list[str] = []
    gpu_programs.run(
        "trainer", ["bash", "-c", "echo done"], workspace / "log", timeout_s=20, env={}, cwd=workspace, on_line=lines.append
    )
    assert lines == ["done"]
    assert notes() == []


def test_a_lock_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lock_folder.folder().mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with (
        pytest.raises(ValueError, match=r"belongs to user .* not to 12345; or set RATCHET_LOCK_FOLDER"),
        gpu_lock.gpu_lock("run"),
    ):
        pass


def test_a_lock_folder_that_cannot_be_made_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(lock_folder, "folder", lambda: tmp_path / "file/locks")
    with (
        pytest.raises(ValueError, match=r"^lock folder .*/file/locks cannot be made: .*; set RATCHET_LOCK_FOLDER"),
        gpu_lock.gpu_lock("run"),
    ):
        pass


@pytest.mark.parametrize("level", ["", "programs"])
def test_a_lock_folder_that_others_may_write_to_is_refused(level: str) -> None:
    made = lock_folder.folder() / level
    made.mkdir(parents=True)
    made.chmod(0o777)
    with pytest.raises(ValueError, match=rf"{made} has mode 0777, .* `chmod 700 {made}`"), gpu_lock.gpu_lock("run"):
        pass


@pytest.mark.parametrize("level", ["", "programs"])
def test_a_lock_folder_that_is_a_link_is_refused(level: str, tmp_path: Path) -> None:
    made, elsewhere = lock_folder.folder() / level, tmp_path / "elsewhere"
    elsewhere.mkdir()
    made.parent.mkdir(parents=True, exist_ok=True)
    made.symlink_to(elsewhere)
    with pytest.raises(ValueError, match=rf"{made} is a link or no folder"), gpu_lock.gpu_lock("run"):
        pass
    assert list(elsewhere.iterdir()) == []


def test_a_lock_folder_below_one_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(private_folder.NotPrivate, match=rf"{parent} has mode 0777: every user could replace"):
        private_folder.make(parent / "locks", checks_parents=True)
    parent.chmod(0o1777)  # as /tmp: each user removes only what is theirs
    private_folder.make(parent / "locks", checks_parents=True)
    assert (parent / "locks").stat().st_mode & 0o777 == 0o700


def test_links_that_somebody_put_in_the_place_of_our_files_are_not_followed(tmp_path: Path) -> None:
    with gpu_lock.gpu_lock("run"):
        pass
    victim = tmp_path / "victim"
    victim.write_text("mine")
    note = lock_folder.holder_path()
    (note.with_name(f"{note.name}.{os.getpid()}-{threading.get_ident()}.partial")).symlink_to(victim)
    with gpu_lock.gpu_lock("run"):
        assert note.is_file() and not note.is_symlink()
    assert victim.read_text() == "mine"
    lock_folder.lock_path().unlink()
    lock_folder.lock_path().symlink_to(victim)
    with pytest.raises(ValueError, match=r"gpu\.lock cannot be opened as a file of this user"), gpu_lock.gpu_lock("run"):
        pass


def test_an_owner_whose_lock_file_was_replaced_starts_no_program(start: Callable[[str], ProcessRef]) -> None:
    lock, note = lock_folder.lock_path(), lock_folder.holder_path()
    with gpu_lock.gpu_lock("run"):
        lock.unlink()
        with pytest.raises(lock_folder.LockReplaced, match=r"was replaced or removed while this process held it"):
            start("sleep 300")
        lock.touch()
        with pytest.raises(lock_folder.LockReplaced):
            start("sleep 300")
        assert notes() == []
    assert note.exists(), "the note may be that of the other owner"


@pytest.fixture
def segment() -> Iterator[Path]:
    """A path for a shared-memory segment, named as SGLang names those of its servers."""
    path = Path(f"/dev/shm/sglang_loads_{uuid.uuid4().hex}.shm")
    yield path
    path.unlink(missing_ok=True)


def holding(segment: Path, start: Callable[[str], ProcessRef]) -> ProcessRef:
    ref = start(f"exec 9>{segment}; sleep 300")
    assert becomes(segment.exists)
    return ref


@pytest.mark.parametrize("dies_first", [False, True])
def test_the_shared_memory_of_an_ended_engine_is_removed(
    segment: Path, start: Callable[[str], ProcessRef], *, dies_first: bool
) -> None:
    others = segment.with_name(f"sglang_loads_{uuid.uuid4().hex}.shm")
    others.touch()
    try:
        ref = holding(segment, start)
        gpu_programs.record_shared_memory(ref)
        if dies_first:
            children.stop_program(ref.program)
        gpu_programs.stop(ref)
        assert not segment.exists()
        assert others.exists(), "no program of ours had it"
        assert notes() == []
    finally:
        others.unlink()


def test_the_next_owner_removes_the_shared_memory_of_a_leftover(segment: Path, start: Callable[[str], ProcessRef]) -> None:
    ref = holding(segment, start)
    gpu_programs.record_shared_memory(ref)
    with gpu_lock.gpu_lock("next"):
        assert not segment.exists()
    assert notes() == []
