"""Become another program that ends with its owner: `python infra/processes/with_owner.py OWNER_PID PROGRAM [ARGUMENT ...]`. Standard library only.

The kernel sends SIGTERM to this process when the owner ends, however it ends (prctl(2), PR_SET_PDEATHSIG). The setting survives exec. If
the owner ended before the setting was made, the parent's pid shows it: then the program is not started.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_BEGUN = 127


def main() -> None:
    owner, argv = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != owner:
        sys.exit(f"{argv[0]} was not begun: process {owner}, which it belongs to, has ended")
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.exit(NOT_BEGUN)


if __name__ == "__main__":
    main()
