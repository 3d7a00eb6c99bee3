"""The process in which the reward `python_tests` runs a completion: `python python_program.py JOB DESCRIPTOR`. Standard library only.

It limits itself, runs the code, then the tests in the same names, and writes the job's token to the descriptor if none of them raised.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
MAX_FILE_BYTES = 16 * 2**20
MAX_OPEN_FILES = 64


def main(job_file: Path, descriptor: int) -> None:
    job = json.loads(job_file.read_bytes())
    job_file.unlink()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    seconds = job["cpu_s"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    names = {"__name__": job["name"]}
    exec(compile(job["code"], "<completion>", "exec"), names)
    exec(compile(job["tests"], "<tests>", "exec"), names)
    os.write(descriptor, job["token"].encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
