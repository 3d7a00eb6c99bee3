"""WHEN: order, loops, parameters."""

import logging
import sys

# Without a level of their own only warnings would reach a terminal and Prefect's log pages.
for name in ("infra", "tasks"):
    logging.getLogger(name).setLevel(logging.INFO)

if sys.argv[:1] == ["-m"]:  # `python -m flows.NAME`, which is about to be imported
    from flows.cli.app import refuse_module

    refuse_module(sys.orig_argv)
