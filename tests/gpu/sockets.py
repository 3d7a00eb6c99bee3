"""Which sockets the processes of a command listen on: `python tests/gpu/sockets.py OUT.json -- COMMAND ...`.

All processes of the machine that were not there before the command are looked at ten times a second. OUT.json has a row for each program
and address, and at the end whether one of them is not on loopback. Exits with the command's code, or 1 for such a socket.
"""

import json
import os
import subprocess
import sys
import time
from ipaddress import ip_address
from pathlib import Path

import psutil

EVERY_S = 0.1


def name_of(process: psutil.Process) -> str:
    """The program's module or script, without paths and numbers."""
    words = [Path(word).name for word in process.cmdline()]
    known = ("infra.megatron", "torch.distributed.run", "sglang_server.py", "vllm_server.py", "prefect", "mlflow")
    return next((each for each in known for word in words if each in word), words[0] if words else process.name())


def look(before: set[int], seen: dict[tuple[str, str], int]) -> None:
    """Count each program's listening addresses."""
    for process in psutil.process_iter():
        if process.pid in before:
            continue
        try:
            found = {(name_of(process), c.laddr.ip) for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
        for each in found:
            seen[each] = seen.get(each, 0) + 1


def main() -> int:
    out, separator, *command = sys.argv[1:]
    assert separator == "--" and command, __doc__
    before, seen = {*psutil.pids(), os.getpid()}, dict[tuple[str, str], int]()
    child = subprocess.Popen(command)
    while child.poll() is None:
        look(before, seen)
        time.sleep(EVERY_S)
    rows = [{"program": name, "address": address, "looks": count} for (name, address), count in sorted(seen.items())]
    outside = [row for row in rows if not ip_address(str(row["address"])).is_loopback]
    Path(out).write_text(json.dumps({"listening": rows, "not on loopback": outside}, indent=1))
    print(json.dumps(rows), flush=True)
    print(f"{len(rows)} programs and addresses, not on loopback: {outside or 'none'}", flush=True)
    return child.returncode or bool(outside)


if __name__ == "__main__":
    sys.exit(main())
