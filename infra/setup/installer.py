"""Install a lock into an environment: by uv where it can be had, else by pip. Standard library only.

uv needs seconds where pip needs minutes: it fetches side by side, links files from its cache, and compiles nothing. Compiling takes 137 CPU
seconds for both environments; that is done in the background, while the first step already runs.
"""

import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PIP_TO_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
}
"""Options of pip's configuration, which uv does not read, and uv's variables for them."""
COMMA_LISTS = ("UV_FIND_LINKS",)
"""Variables whose values have commas between them; in the others, and in pip's configuration, it is white space."""
SECTIONS = ("global", "install", ":env:")
"""Of pip's configuration, the one that counts most at the end."""
LINE_EVERY_S = 10.0
LOG = "install.log"
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
"""What an installer says -> what was wrong and what to do."""


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


STATUS = Status()


class Counted:
    """pip's progress, from its output; uv says only what it downloads."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.done, self.doing = name, total, 0, "fetched"

    def hear(self, line: str) -> str:
        if line.startswith(("Collecting ", "Requirement already satisfied", "Obtaining ")):
            self.done += 1
        elif line.startswith("Installing collected packages"):
            self.doing = "fetched, installing"
        elif line.startswith("Prepared "):  # uv's
            self.done, self.doing = self.total, "fetched, installing"
        return f"{self.name}: {min(self.done, self.total)} of {self.total} packages {self.doing}"


class Uv(NamedTuple):
    program: Path
    sources: dict[str, str]
    """Where it looks for packages: variables by name."""


class Installer:
    """Of all environments of a checkout. Its pip, and uv, lie in the main environment."""

    def __init__(self, main: Path, uv_version: str) -> None:
        self.main, self.uv_version = main, uv_version
        self.lock = threading.Lock()
        self.by_uv: list[Path] = []
        """Environments into which uv installed something."""
        self._uv: Uv | None = None
        self._looked = False

    def uv(self) -> "Uv | None":
        """uv, which is installed by the first call; None where that failed, and pip does the work."""
        with self.lock:
            if not self._looked:
                self._looked = True
                self._uv = self._get_uv()
            return self._uv

    def _get_uv(self) -> "Uv | None":
        command = self._pip(self.main, "install", "--no-deps", f"uv=={self.uv_version}")
        if subprocess.run(command, capture_output=True, check=False).returncode:
            print(f"uv {self.uv_version} cannot be installed here: pip makes the environments, which takes longer", flush=True)
            return None
        listed = subprocess.run(self._pip(self.main, "config", "list"), capture_output=True, text=True, check=False).stdout
        return Uv(self.main / "bin/uv", sources_of(listed))

    def install(self, folder: Path, *arguments: str) -> None:
        """Install into an environment what arguments of `pip install` name.

        Raises:
            SystemExit: where it failed, with the end of what the program said.
        """
        if uv := self.uv():
            command = [str(uv.program), "pip", "install", "--python", str(folder / "bin/python"), *arguments]
            # one index may have a package, another its version: uv would end at the first, pip takes the best of all
            environment = {"UV_INDEX_STRATEGY": "unsafe-best-match", **uv.sources, **os.environ}
            failure = run(command, folder.name, arguments, environment)
            if not failure:
                self.by_uv.append(folder)
                return
            print(f"uv failed for {folder.name}, pip tries the same: {why_failed(failure)}", flush=True)
        command = self._pip(folder, "install", *arguments, "--progress-bar", "off")
        if failure := run(command, folder.name, arguments, dict(os.environ)):
            log = folder / LOG
            with contextlib.suppress(OSError):  # the disk may be full
                log.write_text("".join(failure))
            raise SystemExit(f"cannot install into {folder}: {why_failed(failure)}; all that pip said is in {log}")

    def _pip(self, folder: Path, *arguments: str) -> list[str]:
        """The main environment's pip, to work on an environment."""
        elsewhere = [] if folder == self.main else ["--python", str(folder / "bin/python")]
        return [str(self.main / "bin/python"), "-m", "pip", "--disable-pip-version-check", *elsewhere, *arguments]


def sources_of(listed: str) -> dict[str, str]:
    """Where pip looks for packages, as variables of uv.

    listed: What `pip config list` prints: lines such as global.find-links='/wheels'.
    """
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listed.splitlines():
        name, sign, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if sign and section in found and option in PIP_TO_UV:
            found[section][PIP_TO_UV[option]] = str(ast.literal_eval(value))
    values = {name: value for section in SECTIONS for name, value in found[section].items()}
    return {name: (",".join if name in COMMA_LISTS else " ".join)(value.split()) for name, value in values.items()}


def run(command: Sequence[str], name: str, arguments: Sequence[str], environment: dict[str, str]) -> list[str]:
    """Run an installer and show its progress; gives the lines that it said if it failed, else none."""
    lock = arguments[-1] if "-r" in arguments else None
    counted = Counted(name, num_packages(Path(lock)) if lock else 1)
    said: list[str] = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environment, text=True, errors="replace", **pipes) as child:  # type: ignore[call-overload]
        assert child.stdout
        for line in child.stdout:
            said.append(line)
            STATUS.say(counted.hear(line))
    return (said or [f"exit code {child.returncode}\n"]) if child.returncode else []


def why_failed(said: Sequence[str]) -> str:
    """One line: a known cause with its cure, or the last error that is named."""
    whole = "".join(said)
    for pattern, cause in CAUSES.items():
        if found := re.search(pattern, whole):
            return cause.format(*found.groups())
    lines = [line.strip() for line in said if line.strip()]
    errors = [line for line in lines if re.match("error:", line, re.IGNORECASE)]
    return (errors or lines)[-1]


def compile_in_background(folder: Path) -> None:
    """Start to compile an environment's modules, in time that nothing else wants: where PYTHONDONTWRITEBYTECODE is set, an import keeps nothing."""
    compiler = [str(folder / "bin/python"), "-m", "compileall", "-q", *map(str, folder.glob("lib/python*/site-packages"))]
    # by `nice` alone it takes its share of every core, and products of matrices wait for their slowest thread
    politely = next((command for command in (["chrt", "--idle", "0"], ["nice", "-n", "19"]) if shutil.which(command[0])), [])
    subprocess.Popen([*politely, *compiler], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def num_packages(lock: Path) -> int:
    """Of a lock; a line is a package."""
    lines = (line.strip() for line in lock.read_text().splitlines())
    return sum(bool(line) and line[0] not in "#-" for line in lines)


def version_in(lock: Path, package: str) -> str:
    """Of a package in a lock."""
    return next(line.partition("==")[2].strip() for line in lock.read_text().splitlines() if line.startswith(f"{package}=="))
