"""Make the environments from their locks: `python3 infra/setup/bootstrap.py [--vllm]`. Standard library only; safe to interrupt and repeat.

    .venv          Prefect, MLflow, Megatron, torch, ...       infra/setup/locks/main.txt, and main-cuda.txt where torch is a CUDA build
    .venv-sglang   SGLang and what it needs                    infra/setup/locks/sglang-cpu.txt, or sglang-cuda.txt where there is a GPU
    .venv-vllm     vLLM, to compare engines; with --vllm only      infra/setup/locks/vllm-cuda.txt (Python 3.12)

A file in each environment holds the digest of the locks that it was made from; where it fits, nothing is done. An environment that was
made for another checkout, copied here or linked, is refused: writing to it would change that checkout's.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
LOCKS = CHECKOUT / "infra/setup/locks"
STAMP = "ratchet-locks.sha256"
TORCH_VERSION = "torch/version.py"
PYTHONS = ((3, 11), (3, 12))
NEEDED_GIB = 5.0
"""Room that both environments take at least."""
PIP_LOG = "pip.log"
CAUSES = {
    r"No space left on device|Disk quota exceeded": "the disk is full: make room, or use a checkout on another disk",
    r"Failed to establish a new connection|NameResolutionError|Network is unreachable|ProxyError|ReadTimeoutError": (
        "the package index cannot be reached: check the network, or set PIP_INDEX_URL to an index that can be"
    ),
    r"No matching distribution found for (\S+)": "the package index has no {}: set PIP_INDEX_URL or PIP_EXTRA_INDEX_URL to one that has it",
    r"(?:unable to execute|No such file or directory:|command) '?(gcc|g\+\+|cc|c\+\+|clang|x86_64-linux-gnu-gcc)\b": (
        "a package has to be compiled, and the compiler {} is missing or fails: install gcc and g++ (Debian: build-essential)"
    ),
    r"do not match the hashes": "a download is damaged, or not what the lock names: run this again, and check the package index",
}
"""What pip says -> what was wrong and what to do."""


def has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


def make_main(folder: Path) -> None:
    lock, cuda_lock = LOCKS / "main.txt", LOCKS / "main-cuda.txt"
    if is_made(folder, lock, cuda_lock):
        return
    make_venv(folder)
    pip(folder, "install", "--no-deps", "-r", str(lock))
    if not torch_is_for_cpu(folder):
        pip(folder, "install", "--no-deps", "-r", str(cuda_lock))
    elif has_gpu():
        raise SystemExit(
            "this machine has an NVIDIA GPU, and pip chose torch's CPU build: remove the CPU build from pip's sources and run this again"
        )
    pip(folder, "install", "--no-deps", "--no-build-isolation", "-e", str(CHECKOUT))
    stamp(folder, lock, cuda_lock)


def make_sglang(folder: Path) -> None:
    lock = LOCKS / ("sglang-cuda.txt" if has_gpu() else "sglang-cpu.txt")
    cuda_lock = LOCKS / "main-cuda.txt"
    if is_made(folder, lock, cuda_lock):
        return
    make_venv(folder)
    pip(folder, "install", "--no-deps", "-r", str(lock))
    if not has_gpu() and not torch_is_for_cpu(folder):
        pip(folder, "install", "--no-deps", "-r", str(cuda_lock))  # the CUDA build does not even import without its libraries
    stamp(folder, lock, cuda_lock)


def make_vllm(folder: Path) -> None:
    lock = LOCKS / "vllm-cuda.txt"
    if is_made(folder, lock):
        return
    if sys.version_info[:2] != (3, 12):
        raise SystemExit(f"vLLM's lock is for Python 3.12, this is {sys.version.split()[0]}: set PYTHON, or RATCHET_VLLM_PYTHON")
    make_venv(folder)
    pip(folder, "install", "--no-deps", "-r", str(lock))
    stamp(folder, lock)


def make_venv(folder: Path) -> None:
    """Make an empty environment, or go on with one of this checkout that is not complete."""
    check_ours(folder)
    print(f"making {folder.name}", flush=True)
    if not (folder / "bin/pip").exists():  # the last thing that venv makes
        shutil.rmtree(folder, ignore_errors=True)
        done = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True, check=False)
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


def pip(folder: Path, *arguments: str) -> None:
    command = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", *arguments, "--progress-bar", "off"]
    lock = arguments[-1] if "-r" in arguments else None
    counted = Counted(folder.name, num_packages(Path(lock)) if lock else 1)
    log = folder / PIP_LOG
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as child:
        assert child.stdout
        said = []
        for line in child.stdout:
            said.append(line)
            STATUS.say(counted.hear(line))
    if child.returncode:
        with contextlib.suppress(OSError):  # the disk may be full
            log.write_text("".join(said))
        raise SystemExit(f"cannot install into {folder}: {why_pip_failed(said)}; all that pip said is in {log}")


def why_pip_failed(said: list[str]) -> str:
    """One line: a known cause with its cure, or the last error that pip names."""
    whole = "".join(said)
    for pattern, cause in CAUSES.items():
        if found := re.search(pattern, whole):
            return cause.format(*found.groups())
    lines = [line.strip() for line in said if line.strip()]
    errors = [line for line in lines if re.match("error:", line, re.IGNORECASE)]
    return (errors or lines or ["pip said nothing"])[-1]


def num_packages(lock: Path) -> int:
    """Of a lock; a line is a package."""
    lines = (line.strip() for line in lock.read_text().splitlines())
    return sum(bool(line) and line[0] not in "#-" for line in lines)


class Counted:
    """pip's progress, from its output."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.done, self.doing = name, total, 0, "fetched"

    def hear(self, line: str) -> str:
        if line.startswith(("Collecting ", "Requirement already satisfied", "Obtaining ")):
            self.done += 1
        elif line.startswith("Installing collected packages"):
            self.doing = "fetched, installing"
        return f"{self.name}: {min(self.done, self.total)} of {self.total} packages {self.doing}"


class Status:
    """One line that is written over where stdout is a terminal; elsewhere a line every LINE_EVERY_S. Two threads speak at once."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}
        self.start = self.said_at = time.monotonic()
        self.lock = threading.Lock()

    def say(self, words: str) -> None:
        with self.lock:
            self.words[words.partition(":")[0]] = words
            whole = f"{'; '.join(self.words.values())}, {time.monotonic() - self.start:.0f} s"
            if sys.stdout.isatty():
                width = shutil.get_terminal_size().columns - 1
                print(f"\r{whole[:width].ljust(width)}", end="", flush=True)
            elif time.monotonic() - self.said_at >= LINE_EVERY_S:
                self.said_at = time.monotonic()
                print(whole, flush=True)

    def end(self) -> None:
        if self.words and sys.stdout.isatty():
            print(flush=True)


LINE_EVERY_S = 10.0
STATUS = Status()


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
    wanted_vllm = "--vllm" in sys.argv[1:]
    start = time.monotonic()
    failures: list[BaseException] = []

    def attempt(make: "object", folder: Path) -> None:
        try:
            make(folder)  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001  # handed to the main thread
            failures.append(error)

    threads = [
        threading.Thread(target=attempt, args=(make_main, CHECKOUT / ".venv")),
        threading.Thread(target=attempt, args=(make_sglang, CHECKOUT / ".venv-sglang")),
    ]
    if wanted_vllm:
        threads.append(threading.Thread(target=attempt, args=(make_vllm, CHECKOUT / ".venv-vllm")))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    STATUS.end()
    if failures:
        raise failures[0]
    if (seconds := time.monotonic() - start) > 1:
        print(f"environments ready after {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted: the environments are not complete; the same command goes on with them", file=sys.stderr, flush=True)
        os._exit(130)
