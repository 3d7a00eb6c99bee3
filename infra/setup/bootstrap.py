"""Make the environments from their locks. Standard library; safe to repeat.

    python3 infra/setup/bootstrap.py [--vllm] [--inspect] [--verifiers] [--ray]

    .venv          Prefect, MLflow, Megatron, torch, ...       infra/setup/locks/main.txt, and main-cuda.txt where torch is a CUDA build
    .venv-sglang   SGLang and what it needs                    infra/setup/locks/sglang-cpu.txt, or sglang-cuda.txt where there is a GPU
    .venv-vllm     vLLM, to compare engines; with --vllm only      infra/setup/locks/vllm-cuda.txt (Python 3.12)
    .venv-inspect  inspect-ai, for its tasks; with --inspect only  infra/setup/locks/inspect.txt
    .venv-verifiers  verifiers, for its tasksets; with --verifiers only  infra/setup/locks/verifiers.txt

With --ray, .venv gets Ray too, for runs on several machines: infra/setup/locks/ray.txt.

A file in each environment holds the digest of the locks that it was made from; where it fits, nothing is done. An environment that was
made for another checkout, copied here or linked, is refused: writing to it would change that checkout's.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))  # run by its path, by an interpreter that has not installed anything

from infra.setup.installer import STATUS, Installer, compile_in_background, version_in  # noqa: E402

LOCKS = CHECKOUT / "infra/setup/locks"
STAMP = "ratchet-locks.sha256"
TORCH_VERSION = "torch/version.py"
PYTHONS = ((3, 11), (3, 12))
NEEDED_GIB = 5.0
"""Room that both environments take at least."""


def has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


def make_main(folder: Path, installer: Installer) -> None:
    lock, cuda_lock = LOCKS / "main.txt", LOCKS / "main-cuda.txt"
    if is_made(folder, lock, cuda_lock):
        return
    installer.install(folder, "--no-deps", "-r", str(lock))
    if not torch_is_for_cpu(folder):
        installer.install(folder, "--no-deps", "-r", str(cuda_lock))
    elif has_gpu():
        raise SystemExit(
            "this machine has an NVIDIA GPU, and torch's CPU build was chosen: remove the CPU build from pip's sources and run this again"
        )
    installer.install(folder, "--no-deps", "--no-build-isolation", "-e", str(CHECKOUT))
    stamp(folder, lock, cuda_lock)


def make_sglang(folder: Path, installer: Installer) -> None:
    lock = LOCKS / ("sglang-cuda.txt" if has_gpu() else "sglang-cpu.txt")
    cuda_lock = LOCKS / "main-cuda.txt"
    if is_made(folder, lock, cuda_lock):
        return
    make_venv(folder, "--without-pip")
    installer.install(folder, "--no-deps", "-r", str(lock))
    if not has_gpu() and not torch_is_for_cpu(folder):
        # the CUDA build does not even import without its libraries
        installer.install(folder, "--no-deps", "-r", str(cuda_lock))
    stamp(folder, lock, cuda_lock)


def make_vllm(folder: Path, installer: Installer) -> None:
    lock = LOCKS / "vllm-cuda.txt"
    if is_made(folder, lock):
        return
    if sys.version_info[:2] != (3, 12):
        raise SystemExit(f"vLLM's lock is for Python 3.12, this is {sys.version.split()[0]}: set PYTHON, or RATCHET_VLLM_PYTHON")
    make_venv(folder, "--without-pip")
    installer.install(folder, "--no-deps", "-r", str(lock))
    stamp(folder, lock)


def make_inspect(folder: Path, installer: Installer) -> None:
    make_from(LOCKS / "inspect.txt", folder, installer)


def make_verifiers(folder: Path, installer: Installer) -> None:
    make_from(LOCKS / "verifiers.txt", folder, installer)


def add_ray(folder: Path, installer: Installer) -> None:
    """Install Ray into the main environment, unless it has this version."""
    lock = LOCKS / "ray.txt"
    if not any(folder.glob(f"lib/python*/site-packages/ray-{version_in(lock, 'ray')}.dist-info")):
        installer.install(folder, "--no-deps", "-r", str(lock))


def make_from(lock: Path, folder: Path, installer: Installer) -> None:
    if is_made(folder, lock):
        return
    make_venv(folder, "--without-pip")
    installer.install(folder, "--no-deps", "-r", str(lock))
    stamp(folder, lock)


def make_venv(folder: Path, *options: str) -> None:
    """Make an empty environment, or go on with one of this checkout that is not complete."""
    check_ours(folder)
    last_made = "bin/python" if options else "bin/pip"
    if not (folder / last_made).exists():
        print(f"making {folder.name}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "venv", *options, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"cannot make {folder}: {why_no_venv(done.stdout + done.stderr)}")


def why_no_venv(said: str) -> str:
    if "ensurepip" in said:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return f"{sys.executable} has no ensurepip: install python{version}-venv (Debian, Ubuntu), or set PYTHON to another Python {version}"
    return " ".join(said.split())


def check_room() -> None:
    """End with one line where the disk has no room for environments that are not there yet."""
    free = shutil.disk_usage(CHECKOUT).free / 2**30
    if free < NEEDED_GIB and not any((CHECKOUT / name / STAMP).exists() for name in (".venv", ".venv-sglang")):
        raise SystemExit(f"{CHECKOUT} has {free:.1f} GiB free, the environments take {NEEDED_GIB:g} to 9: make room first")


def check_ours(folder: Path) -> None:
    """End with one line where writing to this environment would change that of another checkout."""
    place = made_at(folder)
    if place is not None and place != folder:
        raise SystemExit(
            f"{folder} is an environment that was made for {place}, and nothing is written to it: "
            f"remove it (a link: `rm {folder}`) and run this again, which makes one of this checkout"
        )
    if place is None and folder.is_symlink():
        raise SystemExit(f"{folder} is a link to {folder.readlink()}, which is no environment of this checkout: remove the link")


def made_at(folder: Path) -> Path | None:
    """Where `python -m venv` was told to make this environment, by its pyvenv.cfg; None where there is none."""
    if not (folder / "pyvenv.cfg").is_file():
        return None
    for line in (folder / "pyvenv.cfg").read_text().splitlines():
        if line.startswith("command = "):
            return Path(re.sub(r"^(--\S+ )*", "", line.rpartition(" -m venv ")[2]))
    return None


def torch_is_for_cpu(folder: Path) -> bool:
    version = next(folder.glob(f"lib/python*/site-packages/{TORCH_VERSION}")).read_text()
    return "cuda: Optional[str] = None" in version or "+cpu" in version


def locks_digest(*locks: Path) -> str:
    content = b"".join(lock.read_bytes() for lock in (*locks, CHECKOUT / "pyproject.toml"))
    return hashlib.sha256(content + sys.version.encode() + str(CHECKOUT).encode()).hexdigest()


def is_made(folder: Path, *locks: Path) -> bool:
    found = folder / STAMP
    return found.exists() and found.read_text() == locks_digest(*locks)


def stamp(folder: Path, *locks: Path) -> None:
    partial = folder / f"{STAMP}.partial"
    partial.write_text(locks_digest(*locks))
    partial.replace(folder / STAMP)


def main() -> None:
    if sys.version_info[:2] not in PYTHONS:
        wanted = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        raise SystemExit(
            f"Python {wanted} is needed, this is {sys.version.split()[0]} ({sys.executable}): set PYTHON to one of those"
        )
    check_room()
    makers = {".venv": make_main, ".venv-sglang": make_sglang}
    on_demand = {"--vllm": (".venv-vllm", make_vllm), "--inspect": (".venv-inspect", make_inspect)}
    on_demand["--verifiers"] = (".venv-verifiers", make_verifiers)
    makers |= dict(made for option, made in on_demand.items() if option in sys.argv[1:])
    start = time.monotonic()
    failures: list[BaseException] = []
    installer = Installer(CHECKOUT / ".venv", version_in(LOCKS / "main.txt", "uv"))
    make_venv(CHECKOUT / ".venv")  # first: all are installed by its pip or uv

    def attempt(make: Callable[[Path, Installer], None], folder: Path) -> None:
        try:
            make(folder, installer)
        except BaseException as error:  # noqa: BLE001  # handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=attempt, args=(make, CHECKOUT / name)) for name, make in makers.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if "--ray" in sys.argv[1:] and not failures:
        add_ray(CHECKOUT / ".venv", installer)
    STATUS.end()
    if failures:
        raise failures[0]
    for folder in set(installer.by_uv):
        compile_in_background(folder)
    if (seconds := time.monotonic() - start) > 1:
        print(f"environments ready after {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted: the environments are not complete; the same command goes on with them", file=sys.stderr, flush=True)
        os._exit(130)
