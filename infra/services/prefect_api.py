"""Requests to Prefect's API, with its password."""

import time
from typing import Any

import httpx

from infra.services import prefect_password

ANSWER_S = 90
"""Above the 60 s for which Prefect's SQLite waits for its lock (Prefect 3.8.8, server/database/configurations.py)."""
PATIENCE_S = 100


def api_client(api_url: str) -> httpx.Client:
    """Return a client for Prefect's API, with its password."""
    auth = prefect_password.of(api_url)
    user, _, password = auth.get_secret_value().partition(":") if auth else ("", "", "")
    return httpx.Client(base_url=api_url, auth=(user, password) if auth else None, timeout=ANSWER_S)


def asked(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None) -> Any:
    """Send one request, again while the server's database is busy, and return the response. Raises ValueError with the server's message if it
    refuses, or if it gives no answer."""
    until = time.monotonic() + PATIENCE_S
    is_safe_twice = method != "POST" or path.endswith("/filter")  # what creates something is not sent again without an answer
    while True:
        try:
            answer = client.request(method, path, json=body)
        except httpx.ReadTimeout as error:
            if not is_safe_twice or time.monotonic() > until:
                raise ValueError(f"Prefect's server gave no answer to {method} {path} in {ANSWER_S} s") from error
        else:
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > until:
                break
        time.sleep(1)
    if answer.is_error:
        raise ValueError(f"Prefect's server refused {method} {path}: HTTP {answer.status_code} {answer.text[:500]}")
    return answer.json() if answer.content else None


def deployments_of(client: httpx.Client, work_pool: str) -> list[dict[str, Any]]:
    """Return the deployments of a work pool."""
    found: list[dict[str, Any]] = asked(client, "POST", "/deployments/filter", {"work_pools": {"name": {"any_": [work_pool]}}})
    return found
