"""WHEN: order, loops, parameters."""

import logging
import sys

# Prefect hands on what its extra loggers let through; without a level of their own that is warnings only.
for name in ("infra", "tasks"):
    logging.getLogger(name).setLevel(logging.INFO)

if sys.argv[:1] == ["-m"]:  # `python -m flows.NAME`, which is about to be imported
    from flows.cli.app import refuse_module

    refuse_module(sys.orig_argv)
