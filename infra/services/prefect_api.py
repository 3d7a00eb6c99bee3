"""Requests to Prefect's API, with its password."""

import time
from typing import Any

import httpx

from infra.services import prefect_password

NUM_TRIES = 30


def api_client(api_url: str) -> httpx.Client:
    """Return a client for Prefect's API, with its password."""
    auth = prefect_password.of(api_url)
    user, _, password = auth.get_secret_value().partition(":") if auth else ("", "", "")
    return httpx.Client(base_url=api_url, auth=(user, password) if auth else None, timeout=60)


def asked(client: httpx.Client, method: str, path: str, body: dict[str, Any]) -> Any:
    """Send one request and return the response. Raises ValueError with the server's message if it refuses."""
    for _ in range(NUM_TRIES):
        answer = client.request(method, path, json=body)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            break
        time.sleep(1)  # its database is busy
    if answer.is_error:
        raise ValueError(f"Prefect's server refused {method} {path}: HTTP {answer.status_code} {answer.text[:500]}")
    return answer.json() if answer.content else None


def deployments_of(client: httpx.Client, work_pool: str) -> list[dict[str, Any]]:
    """Return the deployments of a work pool."""
    found: list[dict[str, Any]] = asked(client, "POST", "/deployments/filter", {"work_pools": {"name": {"any_": [work_pool]}}})
    return found
