"""What works of trainer.share_experts on this machine, in under a minute and without SGLang: `python tests/gpu/shared_experts.py [OUT.json]`.

A lender holds random experts and names them by the launcher's own functions, in SGLang's interpreter. A borrower maps them by the trainer's own
functions. Then the lender's KV cache is released by torch_memory_saver, and the lender is killed while its memory is mapped. Two further lenders
show that memory of torch_memory_saver and of expandable segments is refused. Prints one JSON; ends with 1 where a step could not work here.

`--small` runs on a CPU, where the values are in files.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "infra/engines/launchers/sglang_shared_experts.py"
SHAPE = {"num_experts": 128, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 9}
"""Nine layers of Qwen3-30B-A3B: 10.1 GiB."""
SMALL = {"num_experts": 4, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
CACHE = "kv_cache"
ROLES = ("beside the memory saver", "inside the memory saver", "expandable segments")
EXPANDABLE = "expandable_segments:True"


def answer(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def named(what: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a call returns, or its error."""
    try:
        return what()
    except Exception as error:  # noqa: BLE001  # any error is an answer
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


# -- the lender, in SGLang's interpreter: torch, and the launcher by its path


def lend(role: str, folder: Path) -> None:
    import torch

    shape, device = json.loads((folder / "config.json").read_text()), "cuda" if torch.cuda.is_available() else "cpu"
    spec = importlib.util.spec_from_file_location("sglang_shared_experts", LAUNCHER)
    assert spec and spec.loader
    launcher = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launcher)
    saver = memory_saver() if device == "cuda" and role != ROLES[2] else None
    begin = time.perf_counter()
    if device == "cuda" and role == ROLES[0]:
        launcher.check_mapping(0)
    probe_s = time.perf_counter() - begin
    if saver and role == ROLES[1]:
        with saver.region(tag="weights"):
            held = stacked(shape, device)
    else:
        held = stacked(shape, device)
    if saver and role == ROLES[0]:
        with saver.region(tag=CACHE):
            cache = torch.zeros(2**28, device=device)
    begin = time.perf_counter()
    launcher.write(held, folder)
    sums = {name: int(parameter.data.view(torch.int64).sum()) for name, parameter in held.named_parameters()}
    versions = {"torch": torch.__version__, "torch_memory_saver": "used" if saver else "not used"}
    answer(probe_s=round(probe_s, 2), write_s=round(time.perf_counter() - begin, 3), sums=sums, **versions)
    for line in sys.stdin:
        if line.strip() == "release" and saver:
            saver.pause(CACHE)
        answer(released_gib=cache.nbytes / 2**30 if saver else 0)


def memory_saver() -> Any:
    """torch_memory_saver, for which a program is started again with its library; None where it is not installed."""
    try:
        import torch_memory_saver  # type: ignore[import-not-found]
    except ImportError:
        return None
    if "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
        with torch_memory_saver.configure_subprocess():
            os.execv(sys.executable, [sys.executable, *sys.argv])
    return torch_memory_saver.torch_memory_saver


def stacked(shape: dict[str, int], device: str) -> Any:
    """Random experts, named as SGLang does it."""
    import torch
    from torch import nn

    count, hidden, ffn = shape["num_experts"], shape["hidden_size"], shape["moe_intermediate_size"]
    root = nn.Module()
    for layer in range(shape["num_hidden_layers"]):
        place = root
        for part in f"model.layers.{layer}.mlp.experts".split("."):
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = getattr(place, part)
        for name, size in (("w13_weight", (count, 2 * ffn, hidden)), ("w2_weight", (count, hidden, ffn))):
            values = torch.empty(size, dtype=torch.bfloat16, device=device).normal_()
            place.register_parameter(name, nn.Parameter(values, requires_grad=False))
    return root


# -- the borrower, in the trainer's interpreter


def borrow(folder: Path) -> None:
    import torch
    from torch import nn

    from infra.machine import nvml
    from infra.megatron.checkpoint.shared_experts import ENGINE_NAMES, ExpertWeights, engine_name, sums_of
    from infra.megatron.protocol import shared_experts
    from infra.models.architecture import read_architecture

    a, device = read_architecture(folder), "cuda" if torch.cuda.is_available() else "cpu"
    net, decoder, layers = nn.Module(), nn.Module(), nn.ModuleList()
    net.add_module("decoder", decoder)
    decoder.add_module("layers", layers)
    for _ in range(a.num_layers):
        layer, mlp, experts = nn.Module(), nn.Module(), nn.Module()
        for name in ENGINE_NAMES:
            empty = nn.Parameter(torch.empty(0, dtype=torch.bfloat16, device=device), requires_grad=False)
            experts.register_parameter(name, empty)
        mlp.add_module("experts", experts)
        layer.add_module("mlp", mlp)
        layers.append(layer)
    borrowed = ExpertWeights(net, folder, a, None)  # type: ignore[arg-type]  # reads no files

    def timed(what: Callable[[], object]) -> float:
        begin = time.perf_counter()
        what()
        if device == "cuda":
            torch.cuda.synchronize()
        return round(time.perf_counter() - begin, 4)

    def map_all() -> None:
        found = shared_experts.of_living_engine(folder / shared_experts.FILE)
        assert found, "no lender lives"
        borrowed.map(found, folder)

    def look() -> dict[str, Any]:
        """The sums that the lender took itself, and a product with the memory against one with a copy of it."""
        sums = {engine_name(name): int(sums_of(p).sum()) for name, p in borrowed.parameters.items()}
        first = next(iter(borrowed.parameters.values())).detach()[0]
        x = torch.ones(4, first.shape[1], dtype=first.dtype, device=device)
        return {"sums": sums, "product_is_equal": torch.equal(x @ first.T, x @ first.clone().T), **memory()}

    def memory() -> dict[str, Any]:
        reading, gib = nvml.read(), 2**30
        own = reading.of({os.getpid()})
        used = {"gpu_used_gib": round(reading.gpus[0].used_bytes / gib, 2)} if reading.gpus else {}
        return used | {"own_gib_by_the_driver": {gpu: round(size / gib, 2) for gpu, size in own.items()}}

    def begin() -> dict[str, Any]:
        if device == "cuda":
            torch.ones(1, device=device)
        before = memory()
        found = {"torch": torch.__version__, "before": before, "map_s": timed(map_all)}
        found["sums_first_s"] = timed(look)
        found["sums_s"] = timed(lambda: [sums_of(parameter) for parameter in borrowed.parameters.values()])
        return found | {"close_s": timed(borrowed.release), "map_again_s": timed(map_all)} | look()

    def after() -> dict[str, Any]:
        """What a step would say whose lender has ended: see ExpertWeights.check."""
        borrowed.sums = {name: sums_of(parameter) for name, parameter in borrowed.parameters.items()}
        borrowed.check()
        return {"check": "nothing"}

    def again() -> dict[str, Any]:
        return {"map_s": timed(map_all)}

    def close() -> dict[str, Any]:
        borrowed.release()
        return memory()

    orders: dict[str, Callable[[], dict[str, Any]]] = {"begin": begin, "look": look, "after": after, "close": close, "map": again}
    answer(ready=True)
    for line in sys.stdin:
        answer(**named(orders[line.strip()]))


# -- the parent


class Child:
    def __init__(self, python: str, *words: str, **environment: str) -> None:
        first = str(ROOT) if words[0] == "borrow" else os.environ.get("RATCHET_SGLANG_PYTHONPATH", "")
        path = {"PYTHONPATH": os.pathsep.join(filter(None, (first, os.environ.get("PYTHONPATH", ""))))}
        self.process = subprocess.Popen(
            [python, __file__, *words],
            env={**os.environ, **path, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def heard(self) -> dict[str, Any]:
        """The next answer; where there is none, the last line of its errors."""
        assert self.process.stdout and self.process.stderr
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        lines = self.process.stderr.read().strip().splitlines()
        return {"error": lines[-1] if lines else f"ended with {self.process.wait()} and said nothing"}

    def asked(self, order: str) -> dict[str, Any]:
        assert self.process.stdin
        try:
            self.process.stdin.write(f"{order}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        return self.heard()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def made(folder: Path, role: str, shape: dict[str, int]) -> Path:
    """A folder with the shape, as a model's config.json."""
    place = folder / role.replace(" ", "-")
    place.mkdir()
    whole = {
        "model_type": "qwen3_moe",
        "vocab_size": 128,
        "intermediate_size": shape["moe_intermediate_size"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
    }
    (place / "config.json").write_text(json.dumps(whole | shape))
    return place


def measured(folder: Path, python: str, shape: dict[str, int], *, on_gpu: bool) -> dict[str, Any]:
    place = made(folder, ROLES[0], shape)
    lender, borrower = Child(python, "lend", ROLES[0], str(place)), Child(sys.executable, "borrow", str(place))
    others = {}
    if on_gpu:
        environments: list[dict[str, str]] = [{}, {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}]
        for role, environment in zip(ROLES[1:], environments, strict=True):
            others[role] = Child(python, "lend", role, str(made(folder, role, SMALL)), **environment)
    found: dict[str, Any] = {"lender": lender.heard(), "gib": 6 * shape["num_hidden_layers"] * experts_of(shape) / 2**30}
    sums = found["lender"].pop("sums", None)

    def judged(seen: dict[str, Any]) -> dict[str, Any]:
        return seen | {"sums_are_equal": seen.pop("sums") == sums} if "sums" in seen else seen

    try:
        if "error" not in found["lender"] and "error" not in (ready := borrower.heard()):
            found["mapped"] = judged(borrower.asked("begin"))
            found["lender's cache released"] = lender.asked("release") | judged(borrower.asked("look"))
            lender.kill()
            found["lender killed, still mapped"] = judged(borrower.asked("look"))
            found["what a step says then"] = borrower.asked("after")
            found["closed"] = borrower.asked("close")
            found["mapping it again"] = borrower.asked("map")
        elif "error" not in found["lender"]:
            found["borrower"] = ready
        for role, child in others.items():
            found[role] = {name: value for name, value in child.heard().items() if name != "sums"}
    finally:
        for child in (lender, borrower, *others.values()):
            child.kill()
    return found


def experts_of(shape: dict[str, int]) -> int:
    return shape["num_experts"] * shape["hidden_size"] * shape["moe_intermediate_size"]


def works(found: dict[str, Any]) -> bool:
    """Whether steps with shared experts would go well, and one whose engine ends would not pass."""
    steps = [found.get(name, {}) for name in ("mapped", "lender's cache released")]
    ends = str(found.get("what a step says then", {}).get("error", ""))
    return all(step.get("sums_are_equal") and step.get("product_is_equal") for step in steps) and ends.startswith("EngineEnded")


def main() -> int:
    parser = argparse.ArgumentParser(description="What works of trainer.share_experts on this machine.")
    parser.add_argument("out", nargs="?", type=Path, help="also write the JSON here")
    parser.add_argument("--small", action="store_true", help="some KiB of experts")
    parser.add_argument("--lender-python", help="default: SGLang's interpreter on a GPU, else this one")
    options = parser.parse_args()
    from infra.machine import devices
    from infra.settings import settings

    on_gpu = devices.device() == "cuda"
    python = options.lender_python or (str(settings().sglang_python) if on_gpu else sys.executable)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ratchet-shared-") as folder:
        found = measured(Path(folder), python, SMALL if options.small else SHAPE, on_gpu=on_gpu)
    gpu = devices.gpu_versions() if on_gpu else {"gpu": "none: experts in files"}
    found |= {**gpu, "seconds": round(time.monotonic() - begin, 1), "works": works(found)}
    text = json.dumps(found, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    return 0 if found["works"] else 1


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["lend", role, folder]:
            lend(role, Path(folder))
        case ["borrow", folder]:
            borrow(Path(folder))
        case _:
            sys.exit(main())
