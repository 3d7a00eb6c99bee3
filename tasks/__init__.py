"""WHAT: one verb a file; the pure function first, its Prefect task under it."""

from tasks import prefect_calls

prefect_calls.install()
