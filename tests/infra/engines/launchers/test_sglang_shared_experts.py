"""How memory of a GPU is named and mapped, with a driver of our own in the place of CUDA's: its functions have CUDA's signatures, by cuda.h."""

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from shared import load_module

from infra.settings import CHECKOUT

LAUNCHERS = CHECKOUT / "infra/engines/launchers"
DRIVER = """
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct { char reserved[64]; } Handle;
static const char *last = "the last of 64 bytes";

int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 40; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0x123456789abc; return device == 43 ? 0 : 101; }
int cuCtxSetCurrent(void *context) { return context == (void *)0x123456789abc ? 0 : 201; }
/* Memory of the GPU: a file, of which address 0x7000000000 is the begin. */
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) { *base = 0x7000000000; *size = 4096; return 0; }
int cuIpcGetMemHandle(Handle *handle, uint64_t base) {
    if (base != 0x7000000000) return 1;
    memset(handle->reserved, 7, 64);
    return 0;
}
int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
    for (int i = 0; i < 64; i++) if (handle.reserved[i] != 7) return 400;
    if (flags != 1) return 1;
    int file = open("MEMORY", O_RDONLY);
    if (file < 0) return 801;
    *address = (uint64_t)mmap(0, 4096, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    return 0;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) { memcpy(to, (void *)from, size); return 0; }
"""
MAP = f"""
import ctypes, os, sys, torch
sys.path.insert(0, {str(CHECKOUT)!r})
from infra.megatron.checkpoint import shared_experts
torch.cuda.synchronize = lambda *_: None
address = shared_experts._opened(bytes.fromhex(sys.argv[1]))
print(ctypes.c_uint64.from_address(address + 16).value)
os.unlink(sys.argv[2])
try:
    shared_experts._opened(bytes.fromhex(sys.argv[1]))
except shared_experts.UnusableExperts as error:
    print(error)
"""


@pytest.fixture
def launcher() -> ModuleType:
    return load_module(LAUNCHERS / "sglang_shared_experts.py")


@pytest.mark.skipif(
    shutil.which("cc") is None, reason="the stand-in for CUDA's driver is a C library, and there is no compiler `cc`"
)
def test_names_of_memory_go_through_the_driver_as_its_signatures_ask(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.write_bytes(bytes(16) + (77).to_bytes(8, "little") + bytes(4096))
    source = tmp_path / "driver.c"
    source.write_text(DRIVER.replace("MEMORY", str(memory)))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(source)], check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}

    def said(*arguments: str) -> str:
        done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
        return (done.stdout or done.stderr).strip()

    get = f"import sys; sys.path.insert(0, {str(LAUNCHERS)!r}); import sglang_shared_experts as s; print(*s.cuda_handle(0x7000000010))"
    assert said("-c", get) == f"{bytes([7] * 64)!r} 16"
    probe, handle = str(LAUNCHERS / "map_probe.py"), "07" * 64
    assert said(probe, "3", handle, "16") == "77"
    assert said(probe, "2", handle, "16") == "cuDevicePrimaryCtxRetain gives CUDA's error 101"
    assert said(probe, "3", "07" * 63 + "08", "16") == "cuIpcOpenMemHandle_v2 gives CUDA's error 400"
    refused = "the engine's experts cannot be shared on this GPU: cuIpcOpenMemHandle_v2 gives CUDA's error 801. Set trainer.share_experts to false"
    assert said("-c", MAP, handle, str(memory)).splitlines() == ["77", refused]


def test_an_engine_whose_memory_cannot_be_mapped_fails_before_it_reads_its_weights(
    launcher: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def loads(**how: object) -> SimpleNamespace:
        done.append("loaded")
        return SimpleNamespace(model="model")

    module: Any = SimpleNamespace(**{launcher.FUNCTION: loads})
    launcher.share(Path("folder"), lambda name, patch: patch(module))
    monkeypatch.setattr(launcher, "check_mapping", lambda number: done.append(f"GPU {number}"))
    monkeypatch.setattr(launcher, "write", lambda model, folder: done.append(f"{model} in {folder}"))
    load = getattr(module, launcher.FUNCTION)
    load(memory_saver_adapter=None, is_draft_worker=False, device="cuda", gpu_id=1)
    assert done == ["GPU 1", "loaded", "model in folder"]
    done.clear()
    load(memory_saver_adapter=None, is_draft_worker=True, device="cuda", gpu_id=1)
    load(memory_saver_adapter=None, device="cpu", gpu_id=0)
    assert done == ["loaded", "loaded", "model in folder"], "a draft is another model; a CPU has nothing to map"


def test_a_probe_that_fails_or_reads_something_else_is_one_line(launcher: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    full = launcher.torch.full
    monkeypatch.setattr(launcher.torch, "full", lambda *size, device, **how: full(*size, **how))
    monkeypatch.setattr(launcher.torch.cuda, "synchronize", lambda number: nullcontext())
    monkeypatch.setattr(launcher, "cuda_handle", lambda address: (bytes(64), 0))
    cases = {
        (1, "", "Traceback\ncuInit gives CUDA's error 3"): "the GPU: cuInit gives CUDA's error 3. Set trainer.share_experts",
        (0, "5\n", ""): "the GPU: it reads 5, not 20015998343868. Set trainer.share_experts to false",
    }
    for (code, output, errors), words in cases.items():
        ended = SimpleNamespace(returncode=code, stdout=output, stderr=errors)
        monkeypatch.setattr(launcher.subprocess, "run", lambda *_, ended=ended, **__: ended)
        with pytest.raises(RuntimeError, match=words):
            launcher.check_mapping(0)
    monkeypatch.setattr(
        launcher.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout=f"{launcher.PROBED}\n", stderr="")
    )
    launcher.check_mapping(0)
