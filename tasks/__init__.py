"""WHAT: one verb per file; the pure function first, its Prefect task below it."""

from tasks.support import flow_logs, plain_errors, prefect_calls

flow_logs.install()
plain_errors.install()
prefect_calls.install()
