"""Every colocation plan through its whole protocol, against a scripted server and a driver that says what it holds."""

import os
import signal
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from shared import becomes

from infra.colocation import confirm_memory, engine_memory, plans
from infra.config import ColocationPlan, EngineConfig
from infra.engines import checked, open_engine
from infra.engines.interface import Engine
from infra.engines.server import server_process
from infra.engines.sglang import memory_api
from infra.engines.sglang.engine import graph_sizes
from infra.failures import EngineOutOfMemory, EngineRefused, EngineUnavailable, WrongAnswer
from infra.machine import devices, nvml
from infra.machine.nvml import GIB, Gpu, Holding, Reading
from infra.processes import children, gpu_programs
from infra.records import AdapterVersion
from infra.settings import settings

MakeAdapter = Callable[[int], AdapterVersion]
SetFault = Callable[[str], None]
TOTAL_GIB = 140
OTHER_PID = 999_999


class FakeDriver:
    """One GPU of 140 GiB: the scripted server holds what its file says, another process holds the rest."""

    def __init__(self, memory_file: Path) -> None:
        self.memory_file = memory_file
        self.others_gib = 0.0
        """What a trainer holds."""
        self.names_processes = True

    def read(self) -> Reading:
        state = server_process.recorded()
        own = float(self.memory_file.read_text()) if state and self.memory_file.exists() else 0.0
        used = int((own + self.others_gib) * GIB)
        gpus = (Gpu(0, "GPU-0", used, TOTAL_GIB * GIB),)
        named = {state.process.pid if state else 0: own, OTHER_PID: self.others_gib}
        holdings = tuple(Holding(0, pid, int(gib * GIB)) for pid, gib in named.items() if gib)
        return Reading(gpus, holdings if self.names_processes else ())


pytestmark = pytest.mark.usefixtures("over_scripted_server")


@pytest.fixture
def gpu(workspace: Path, set_fault: SetFault, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A machine with one GPU."""
    fake = FakeDriver(workspace / "fault.memory")
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    monkeypatch.setattr(nvml, "read", fake.read)
    monkeypatch.setattr(devices, "gpu_versions", lambda numbers=(): {})
    monkeypatch.setattr(nvml, "numbers", lambda: tuple(gpu.number for gpu in fake.read().gpus))
    monkeypatch.setattr(devices, "gpu_memory_total_bytes", lambda: fake.read().gpus[0].total_bytes)
    monkeypatch.setattr(devices, "gpu_memory_used_bytes", lambda: fake.read().gpus[0].used_bytes)
    monkeypatch.setattr(checked, "MEMORY_DEADLINE_S", 0.5)
    monkeypatch.setenv("RATCHET_LOCK_FOLDER", str(workspace / "locks"))
    settings.cache_clear()
    monkeypatch.setattr(memory_api, "DRAIN_DEADLINE_S", 1.0)
    monkeypatch.setattr(confirm_memory, "ROOM_DEADLINE_S", 1.0)
    monkeypatch.setattr(plans, "DEADLINE_S", dict.fromkeys(plans.DEADLINE_S, 1.0))
    # the size of the scripted server's model, in the place of the tiny one's few bytes
    monkeypatch.setattr(engine_memory, "weight_bytes", lambda dtype, model: 15 * GIB)
    monkeypatch.setattr(engine_memory, "kv_cache_bytes", lambda engine, architecture, num_tokens: 83 * GIB)
    return fake


def awake(config: EngineConfig, adapter: AdapterVersion, plan: ColocationPlan) -> Engine:
    engine = open_engine(config.but(colocation=plan, dtype="float32"), adapter)
    engine.wake()
    engine.load_adapter(adapter)
    return engine


def control(workspace: Path) -> list[str]:
    path = workspace / "fault.control"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("plan", "tags", "freed_gib"),
    [("keep_weights", "kv_cache", 83), ("offload", "kv_cache weights", 98), ("reload", "kv_cache weights", 98)],
)
def test_a_plan_goes_through_its_whole_protocol_and_the_engine_answers_as_before(
    engine_config: EngineConfig,
    scripted_adapter: MakeAdapter,
    gpu: FakeDriver,
    workspace: Path,
    plan: ColocationPlan,
    tags: str,
    freed_gib: int,
) -> None:
    adapter = scripted_adapter(1)
    engine = awake(engine_config, adapter, plan)
    release = engine.release_memory()
    assert (release.plan, release.released_bytes) == (plan, freed_gib * GIB)
    engine.wake()
    engine.load_adapter(scripted_adapter(2))  # the golden check included
    expected = ["/pause_generation", "/flush_cache", f"/release_memory_occupation {tags}", f"/resume_memory_occupation {tags}"]
    expected += ["/update_weights_from_disk"] if plan == "reload" else []
    assert control(workspace) == [*expected, "/continue_generation"]
    state = server_process.recorded()
    assert state is not None and (state.launch, state.is_awake, state.is_verified, state.released) == (1, True, True, {})
    assert state.kv_cache_tokens == 65536


@pytest.mark.parametrize("plan", ["keep_weights", "offload", "reload"])
def test_an_adapter_that_was_checked_before_the_sleep_is_checked_again_after_it(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, set_fault: SetFault, plan: ColocationPlan
) -> None:
    adapter = scripted_adapter(1)
    engine = awake(engine_config, adapter, plan)
    engine.release_memory()
    engine.wake()
    set_fault("forgets the adapter")
    with pytest.raises(WrongAnswer, match="canary"):
        engine.load_adapter(adapter)


def test_plan_restart_ends_the_server_and_the_next_one_serves_the_adapter(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver
) -> None:
    engine = awake(engine_config, scripted_adapter(1), "restart")
    first = server_process.recorded()
    assert engine.release_memory().released_bytes == 100 * GIB
    assert first is not None and children.find(first.process) is None
    engine.wake()
    engine.load_adapter(scripted_adapter(1))
    second = server_process.recorded()
    assert second is not None and second.launch == 2


def test_plan_split_releases_nothing_and_the_engine_never_sleeps(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_ENGINE_GPUS", "[0]")
    monkeypatch.setenv("RATCHET_TRAINER_GPUS", "[1]")
    settings.cache_clear()
    engine = awake(engine_config, scripted_adapter(1), "separate_gpus")
    assert engine.release_memory().released_bytes == 0
    engine.wake()
    assert control(workspace) == []
    state = server_process.recorded()
    process = children.find(state.process) if state else None
    assert process is not None and process.environ()["CUDA_VISIBLE_DEVICES"] == "0"


def test_weights_that_were_released_without_a_copy_and_not_read_again_are_caught(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, set_fault: SetFault
) -> None:
    engine = awake(engine_config, scripted_adapter(1), "reload")
    engine.release_memory()
    set_fault("reads nothing")  # success is reported all the same
    engine.wake()
    with pytest.raises(WrongAnswer, match=r"golden check: .* its weights are not what they were"):
        engine.load_adapter(scripted_adapter(1))
    assert server_process.recorded() is None, "it was ended: no process adopts it as it is"


def test_a_backup_that_the_server_does_not_keep_is_caught(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = open_engine(engine_config.but(colocation="offload", dtype="float32"), scripted_adapter(0))
    flags = tuple(flag for flag in program.flags if flag != "--enable-weights-cpu-backup")
    assert len(flags) == len(program.flags) - 1
    monkeypatch.setattr("infra.engines.sglang.engine.SGLangEngine.flags", flags)
    engine = awake(engine_config, scripted_adapter(0), "offload")
    engine.release_memory()
    engine.wake()
    with pytest.raises(WrongAnswer, match="golden check"):
        engine.load_adapter(scripted_adapter(0))


def test_the_copy_on_the_host_is_kept_by_plan_offload_alone_and_only_where_it_is_asked_for(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(**changes: object) -> tuple[bool, str]:
        program = open_engine(engine_config.but(dtype="float32", **changes), scripted_adapter(0)).program  # type: ignore[attr-defined]
        return program._command(1)[1].get("TMS_RETAIN_CPU_BACKUP") == "1", program.identity

    kept, identity = launched(colocation="offload")
    freed, other = launched(colocation="offload", keep_host_copy=False)
    assert (kept, freed) == (True, False)
    assert identity != other, "one server does not turn into the other"
    assert [launched(colocation=plan)[0] for plan in ("keep_weights", "reload", "restart")] == [False] * 3
    monkeypatch.setattr(devices, "device", lambda: "cpu")
    assert not launched(colocation="offload")[0]


def test_on_a_gpu_adapters_are_served_by_the_backend_that_is_fastest_for_one_and_another_one_can_be_named(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver
) -> None:
    def backends(**changes: object) -> list[str]:
        flags = open_engine(engine_config.but(dtype="float32", **changes), scripted_adapter(0)).flags
        return [value for name, value in pairwise(flags) if name == "--lora-backend"]

    assert backends() == ["triton"]
    assert backends(lora_mode="merged") == []
    assert backends(extra_flags=("--lora-backend", "csgmv")) == ["triton", "csgmv"]  # of two, SGLang takes the last


def test_on_a_gpu_as_many_requests_have_cuda_graphs_as_may_run(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver
) -> None:
    flags = open_engine(engine_config.but(dtype="float32", max_running_requests=320), scripted_adapter(0)).flags
    sizes = flags[flags.index("--cuda-graph-bs-decode") + 1 :][: len(graph_sizes(320))]
    assert list(map(int, sizes)) == graph_sizes(320) and sizes[-1] == "320"
    replaced = engine_config.but(dtype="float32", extra_flags=("--cuda-graph-max-bs-decode", "64"))
    assert "--cuda-graph-bs-decode" not in open_engine(replaced, scripted_adapter(0)).flags


def test_weights_that_cannot_be_read_stop_the_wake(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, set_fault: SetFault
) -> None:
    engine = awake(engine_config, scripted_adapter(0), "reload")
    engine.release_memory()
    set_fault("cannot read")
    with pytest.raises(EngineRefused, match="update_weights_from_disk: HTTP 400"):
        engine.wake()
    set_fault("")
    engine.wake()
    state = server_process.recorded()
    assert state is not None and state.launch == 2, "of the other it is not known what it holds"


@pytest.mark.parametrize(
    ("plan", "found", "allowed"),
    [("keep_weights", "100.0 GiB of GPU 0", "18.0"), ("reload", "100.0 GiB", "3.0"), ("offload", "100.0", "3.0")],
)
def test_memory_that_is_not_freed_is_an_error_that_says_who_has_it_and_what_was_expected(
    engine_config: EngineConfig,
    scripted_adapter: MakeAdapter,
    gpu: FakeDriver,
    set_fault: SetFault,
    plan: ColocationPlan,
    found: str,
    allowed: str,
) -> None:
    engine = awake(engine_config, scripted_adapter(0), plan)
    pid = server_process.recorded().process.pid  # type: ignore[union-attr]
    set_fault("does not release")
    message = rf"1 s after the release by plan {plan}, the engine still has {found}.*pid {pid}: 100\.0 GiB.*at most {allowed} GiB"
    with pytest.raises(EngineUnavailable, match=message):
        engine.release_memory()
    assert server_process.recorded() is None


def test_the_index_of_a_large_kv_cache_may_stay(
    engine_config: EngineConfig,
    scripted_adapter: MakeAdapter,
    gpu: FakeDriver,
    set_fault: SetFault,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = awake(engine_config, scripted_adapter(0), "reload")
    monkeypatch.setattr(engine_memory, "KV_INDEX_BYTES", 5 * GIB // 65_536)  # of 65,536 tokens
    set_fault("does not release")
    with pytest.raises(EngineUnavailable, match=r"at most 8\.0 GiB"):
        engine.release_memory()


def test_a_release_that_frees_a_part_only_is_not_taken_for_one(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(memory_api.RELEASED_TAGS, "offload", ["kv_cache"])
    engine = awake(engine_config, scripted_adapter(0), "offload")
    with pytest.raises(EngineUnavailable, match=r"still has 17\.0 GiB of GPU 0"):
        engine.release_memory()


def test_where_the_driver_names_no_processes_all_use_counts_and_a_sleeping_trainer_is_allowed_for(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver
) -> None:
    gpu.names_processes, gpu.others_gib = False, 2.6
    engine = awake(engine_config, scripted_adapter(0), "reload")
    assert engine.release_memory().released_bytes == 98 * GIB


@pytest.mark.parametrize("plan", ["keep_weights", "reload"])
def test_where_the_driver_names_no_processes_others_may_keep_what_they_had(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, set_fault: SetFault, plan: ColocationPlan
) -> None:
    """A trainer that sleeps with its weights on the GPU is no part of an engine that released all that it was told to."""
    gpu.names_processes = False
    engine = awake(engine_config, scripted_adapter(0), plan)
    gpu.others_gib = 18
    freed = 83 if plan == "keep_weights" else 98
    assert engine.release_memory().released_bytes == freed * GIB
    engine.wake()
    engine.load_adapter(scripted_adapter(0))
    set_fault("does not release")
    with pytest.raises(EngineUnavailable, match=rf"all processes together .* at most {118 - freed}\.5 GiB"):
        engine.release_memory()


@pytest.mark.parametrize(("slept", "today"), [("keep_weights", "reload"), ("reload", "keep_weights")])
def test_an_engine_wakes_by_the_plan_that_put_it_to_sleep(
    engine_config: EngineConfig,
    scripted_adapter: MakeAdapter,
    gpu: FakeDriver,
    workspace: Path,
    slept: ColocationPlan,
    today: ColocationPlan,
) -> None:
    """With smaller micro-batches, say, a run may go on under another plan; the server's flags are the same."""
    awake(engine_config, scripted_adapter(1), slept).release_memory()
    engine = open_engine(engine_config.but(colocation=today, dtype="float32"), scripted_adapter(1))
    engine.wake()
    engine.load_adapter(scripted_adapter(1))
    released, resumed = (line for line in control(workspace) if "memory_occupation" in line)
    assert resumed == released.replace("release", "resume")
    assert ("/update_weights_from_disk" in control(workspace)) is (slept == "reload")
    state = server_process.recorded()
    assert state is not None and (state.launch, state.is_awake, state.slept_by) == (1, True, None)


def test_of_an_engine_that_died_nothing_lives_on_beside_the_trainer(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, workspace: Path
) -> None:
    engine = awake(engine_config, scripted_adapter(0), "keep_weights")
    state = server_process.recorded()
    assert state is not None
    # In its place one whose child outlives it, as a scheduler does that hangs in the driver.
    child = "import subprocess, sys, time; subprocess.Popen(['sleep', '300'], start_new_session=True); print('begun', flush=True); time.sleep(300)"
    ref = gpu_programs.start(
        "sglang", [sys.executable, "-c", child], workspace / "log", {}, state_file=server_process.state_path()
    )
    assert becomes(lambda: "begun" in (workspace / "log").read_text())
    gpu_programs.stop(state.process)
    server_process.remember(state.but(process=ref))
    os.kill(ref.pid, signal.SIGKILL)
    assert becomes(lambda: children.find(ref) is None) and children.members(ref.program)
    assert engine.release_memory().released_bytes == 0
    assert not children.members(ref.program)


def test_an_engine_is_drained_before_it_releases(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, set_fault: SetFault, workspace: Path
) -> None:
    engine = awake(engine_config, scripted_adapter(0), "keep_weights")
    set_fault("busy at first")
    engine.release_memory()
    assert control(workspace)[-1].startswith("/release_memory_occupation")


def test_an_engine_that_goes_on_working_is_not_told_to_release(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, set_fault: SetFault, workspace: Path
) -> None:
    engine = awake(engine_config, scripted_adapter(0), "keep_weights")
    set_fault("busy")
    with pytest.raises(EngineUnavailable, match="still works on requests: a release would kill it"):
        engine.release_memory()
    assert control(workspace) == ["/pause_generation"]


def test_the_engine_wakes_when_the_trainer_is_off_the_gpu_and_says_who_is_not(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, workspace: Path
) -> None:
    engine = awake(engine_config, scripted_adapter(0), "reload")
    engine.release_memory()
    gpu.others_gib = 60
    with pytest.raises(EngineOutOfMemory, match=rf"GPU 0 has 78\.0 GiB free, needed are 98\.0 .*pid {OTHER_PID}: 60\.0 GiB"):
        engine.wake()
    assert not [line for line in control(workspace) if line.startswith("/resume")]


def test_an_engine_is_not_launched_beside_a_trainer_that_holds_its_memory(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver
) -> None:
    gpu.others_gib = 60
    with pytest.raises(EngineOutOfMemory, match="the engine's launch: after 1 s there is no room"):
        open_engine(engine_config.but(colocation="keep_weights"), scripted_adapter(0)).wake()


def test_a_kv_cache_that_shrank_in_its_sleep_is_an_error(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, set_fault: SetFault
) -> None:
    engine = awake(engine_config, scripted_adapter(0), "keep_weights")
    engine.release_memory()
    set_fault("smaller cache")
    with pytest.raises(EngineUnavailable, match="room for 65436 tokens, before its release it had 65536"):
        engine.wake()


def test_a_release_that_was_done_already_is_not_done_again(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, workspace: Path
) -> None:
    engine = awake(engine_config, scripted_adapter(0), "offload")
    engine.release_memory()
    before = control(workspace)
    assert engine.release_memory().released_bytes == 0
    assert control(workspace) == before


def test_without_a_gpu_a_plan_is_rehearsed_and_says_so(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    engine = awake(engine_config, scripted_adapter(0), "reload")
    release = engine.release_memory()
    assert release.released_bytes == 0 and "rehearsed" in release.reason
    engine.wake()
    assert "/update_weights_from_disk" in control(workspace)


# vLLM: the same guards, through the same code


@pytest.mark.parametrize("plan", ["keep_weights", "offload"])
def test_vllm_gives_back_its_weights_too_and_the_driver_confirms_it(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, plan: ColocationPlan
) -> None:
    engine = awake(engine_config.but(kind="vllm"), scripted_adapter(1), plan)
    assert engine.release_memory().released_bytes == 98 * GIB
    state = server_process.recorded()
    assert state is not None and (state.is_awake, state.slept_by, state.released) == (False, plan, {0: 98 * GIB})
    engine.wake()
    engine.load_adapter(scripted_adapter(1))


@pytest.mark.parametrize(("fault", "still"), [("does not release", "100"), ("frees a little", "99")])
@pytest.mark.parametrize("plan", ["keep_weights", "offload"])
def test_memory_that_vllm_does_not_free_is_an_error_even_if_it_frees_a_little(
    engine_config: EngineConfig,
    scripted_adapter: MakeAdapter,
    gpu: FakeDriver,
    set_fault: SetFault,
    plan: ColocationPlan,
    fault: str,
    still: str,
) -> None:
    engine = awake(engine_config.but(kind="vllm"), scripted_adapter(0), plan)
    set_fault(fault)
    with pytest.raises(
        EngineUnavailable, match=rf"by plan {plan}, the engine still has {still}\.0 GiB of GPU 0.*at most 3\.0 GiB"
    ):
        engine.release_memory()
    assert server_process.recorded() is None


def test_vllm_wakes_when_the_trainer_is_off_the_gpu(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver
) -> None:
    engine = awake(engine_config.but(kind="vllm"), scripted_adapter(0), "offload")
    engine.release_memory()
    gpu.others_gib = 60
    with pytest.raises(EngineOutOfMemory, match=rf"the engine's wake: .*needed are 98\.0 .*pid {OTHER_PID}: 60\.0 GiB"):
        engine.wake()


def test_vllm_is_not_launched_beside_a_trainer_that_holds_its_memory(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver
) -> None:
    gpu.others_gib = 60
    with pytest.raises(EngineOutOfMemory, match="the engine's launch: after 1 s there is no room"):
        open_engine(engine_config.but(kind="vllm", colocation="offload"), scripted_adapter(0)).wake()


def test_vllms_ranks_need_equal_room_unless_it_is_allowed(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = of_two(free_gib=(139, 120))
    monkeypatch.setattr(nvml, "read", lambda: two)
    monkeypatch.setattr(devices, "engine_gpus", lambda ranks, replica: [4, 5])
    config = engine_config.but(kind="vllm", colocation="offload")
    with pytest.raises(EngineUnavailable, match=r"unequal room.*set engine\.allow_unequal_memory"):
        open_engine(config, scripted_adapter(0)).wake()
    open_engine(config.but(allow_unequal_memory=True), scripted_adapter(0)).wake()


def test_a_kv_cache_that_shrank_in_vllms_sleep_is_an_error(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, set_fault: SetFault
) -> None:
    engine = awake(engine_config.but(kind="vllm"), scripted_adapter(0), "offload")
    engine.release_memory()
    set_fault("smaller cache")
    with pytest.raises(EngineUnavailable, match="room for 3996 tokens, before its release it had 4096"):
        engine.wake()


def test_with_gpus_of_its_own_vllm_keeps_its_memory(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_ENGINE_GPUS", "[0]")
    monkeypatch.setenv("RATCHET_TRAINER_GPUS", "[1]")
    settings.cache_clear()
    engine = awake(engine_config.but(kind="vllm"), scripted_adapter(1), "auto")
    release = engine.release_memory()
    assert (release.plan, release.released_bytes) == ("separate_gpus", 0)
    state = server_process.recorded()
    assert state is not None and state.is_awake


# unequal memory over tensor-parallel ranks


def of_two(*, free_gib: tuple[float, float]) -> Reading:
    gpus = tuple(Gpu(n, f"GPU-{n}", int((140 - free) * GIB), 140 * GIB) for n, free in enumerate(free_gib, start=4))
    return Reading(gpus, (Holding(5, 77, 30 * GIB),))


def test_unequal_room_is_said_with_ranks_and_gpus_before_the_engine_starts() -> None:
    message = r"rank 0 on GPU 4: 139\.0 of 140\.0 GiB free .*rank 1 on GPU 5: 110\.0 of 140\.0 GiB free \(pid 77: 30\.0 GiB\)"
    with pytest.raises(EngineUnavailable, match=message):
        confirm_memory.check_equal_memory(of_two(free_gib=(139, 110)), [4, 5], is_allowed=False)
    scores = confirm_memory.check_equal_memory(of_two(free_gib=(139, 110)), [4, 5], is_allowed=True)
    assert scores is not None and "unequal room" in scores


def test_nearly_equal_room_and_one_gpu_are_no_matter() -> None:
    assert confirm_memory.check_equal_memory(of_two(free_gib=(139, 130)), [4, 5], is_allowed=False) is None
    assert confirm_memory.check_equal_memory(of_two(free_gib=(139, 20)), [5], is_allowed=False) is None


def test_sglangs_own_check_is_off_on_request_only(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    for is_allowed in (False, True):
        engine = open_engine(engine_config.but(allow_unequal_memory=is_allowed), scripted_adapter(0))
        engine.wake()
        state = server_process.recorded()
        process = children.find(state.process) if state else None
        assert process is not None
        assert (process.environ().get("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK") == "false") is is_allowed
        engine.stop()
