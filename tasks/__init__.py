"""WHAT: one verb a file; the pure function first, its Prefect task under it."""

from tasks.support import plain_errors, prefect_calls

plain_errors.install()
prefect_calls.install()
