"""WHEN: order, loops, parameters."""

import logging
import sys

from flows import interrupts, programs

# Prefect hands on what its extra loggers let through; without a level of their own that is warnings only.
for name in ("infra", "tasks"):
    logging.getLogger(name).setLevel(logging.INFO)

if sys.argv[:1] == ["-m"]:  # a command `python -m flows.NAME`, which is about to be imported
    interrupts.install()
    if refused := programs.refusal(sys.orig_argv):
        sys.stderr.write(f"{refused}\n")
        sys.exit(2)
