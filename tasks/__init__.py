"""WHAT: one verb per file; the pure function first, its Prefect task below it."""

from tasks.support import plain_errors, prefect_calls

plain_errors.install()
prefect_calls.install()
