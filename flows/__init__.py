"""WHEN: order, loops, parameters."""

import logging

# Prefect hands on what its extra loggers let through; without a level of their own that is warnings only.
for name in ("infra", "tasks"):
    logging.getLogger(name).setLevel(logging.INFO)
