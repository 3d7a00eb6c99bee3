"""Let another program compute with the engine's experts: their memory is named in a file, for infra.megatron.checkpoint.shared_experts.

`RATCHET_SHARED_EXPERTS=FOLDER` asks for it. Read in SGLang 0.5.17 (GPU) and 0.5.18 (CPU), where the stacked experts of a layer are
`model.layers.N.mlp.experts.w13_weight` [E, 2 F, H], gate before up, and `w2_weight` [E, H, F].

* On a GPU: CUDA's handle of the memory, which a program of the same user can map. torch_memory_saver allocates by cuMemCreate, and torch's
  expandable segments do: such memory has no handle. So the weights lie outside of it, and nothing of them can be released. Where another program
  cannot map them, the engine's start fails before its weights are read.
* On a CPU: the values move into files of the folder, which both programs map.

Runs in SGLang's own environment and imports nothing of ours. `sglang_server.py` loads it in every process that the server spawns; the one that
loads the model writes the file.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

VARIABLE = "RATCHET_SHARED_EXPERTS"
"""Environment variable with the folder."""
FILE = "experts.json"
MODULE = "sglang.srt.model_executor.model_runner_components.load_model_utils"
FUNCTION = "load_model_with_memory_saver"
STACKS = (".experts.w13_weight", ".experts.w2_weight")
HANDLE_BYTES = 64
ADVICE = "Set trainer.share_experts to false"
PROBED = 0x1234_5678_9ABC
PROBE_TIMEOUT_S = 60


class NothingSaved:
    """A memory saver that leaves memory where torch has it."""

    def region(self, *_: object, **__: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def share(folder: Path, patch_after_import: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
    """Have SGLang write FILE into the folder when it has loaded its model. patch_after_import: The function of after_import.py."""

    def patch(module: ModuleType) -> None:
        load = getattr(module, FUNCTION)

        def load_and_share(*, memory_saver_adapter: object, is_draft_worker: bool = False, **rest: Any) -> Any:
            if is_draft_worker:  # its model is another one
                return load(memory_saver_adapter=memory_saver_adapter, is_draft_worker=True, **rest)
            if torch.device(rest["device"]).type == "cuda":
                check_mapping(int(rest["gpu_id"]))
            loaded = load(memory_saver_adapter=NothingSaved(), is_draft_worker=False, **rest)
            write(loaded.model, folder)
            return loaded

        setattr(module, FUNCTION, load_and_share)

    patch_after_import(MODULE, patch)


def check_mapping(number: int) -> None:
    """Check that another program can map memory of this one. number: The GPU, in CUDA's order.

    Raises:
        RuntimeError: says why not.
    """
    known = torch.full((2**17,), PROBED, dtype=torch.int64, device=f"cuda:{number}")
    torch.cuda.synchronize(number)
    handle, offset = cuda_handle(known.data_ptr())
    program = str(Path(__file__).with_name("map_probe.py"))
    command = [sys.executable, program, str(number), handle.hex(), str(offset)]
    environment = {**os.environ, "LD_PRELOAD": ""}  # without torch_memory_saver
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    if done.returncode or int(done.stdout) != PROBED:
        said = (done.stderr.strip().splitlines() or [f"it reads {done.stdout.strip()}, not {PROBED}"])[-1]
        raise RuntimeError(f"another program cannot map this one's memory on the GPU: {said}. {ADVICE}")


def write(model: torch.nn.Module, folder: Path) -> None:
    """Write where the model's stacked experts are, and which process holds them. Nothing for a model without experts."""
    stacks = {name: parameter for name, parameter in model.named_parameters() if name.endswith(STACKS)}
    about = {name: place_of(parameter, folder / f"{number}.bin") for number, (name, parameter) in enumerate(stacks.items())}
    for name, parameter in stacks.items():
        about[name] |= {"dtype": str(parameter.dtype).removeprefix("torch."), "shape": list(parameter.shape)}
    if not about:
        return
    partial = folder / f"{FILE}.partial"
    partial.touch(mode=0o600)  # who can read a handle can map the memory
    partial.write_text(json.dumps({"process": this_process(), "stacks": about}))
    partial.rename(folder / FILE)


def this_process() -> dict[str, object]:
    """Return pid, start and boot as the kernel gives them: see infra.processes.children.ProcessRef."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"pid": os.getpid(), "started_ticks": int(started), "boot": boot}


def place_of(parameter: torch.nn.Parameter, path: Path) -> dict[str, object]:
    """Return the place of a tensor's memory. On a CPU it moves there."""
    if not parameter.is_contiguous():
        raise ValueError(f"experts of shape {tuple(parameter.shape)} are not contiguous: they cannot be shared")
    if parameter.device.type == "cuda":
        handle, offset = cuda_handle(parameter.data_ptr())
        return {"handle": handle.hex(), "offset": offset}
    moved = torch.from_file(str(path), shared=True, size=parameter.numel(), dtype=parameter.dtype).view_as(parameter)
    moved.copy_(parameter.data)
    parameter.data = moved
    return {"file": path.name}


def cuda_handle(address: int) -> tuple[bytes, int]:
    """Return the handle of the allocation that an address of the GPU lies in, and the address's distance from its begin."""
    driver = ctypes.CDLL("libcuda.so.1")
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), (ctypes.c_ubyte * HANDLE_BYTES)()
    for code in (
        driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)),
        driver.cuIpcGetMemHandle(ctypes.byref(handle), base),
    ):
        if code:
            raise RuntimeError(f"CUDA gives no handle of this program's memory: error {code}. {ADVICE}")
    return bytes(handle), address - base.value
