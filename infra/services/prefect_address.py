"""Check the Prefect server named by PREFECT_API_URL: that it is one, and accepts our password."""

import contextlib
import os
import re

import httpx

from infra.services import prefect_api


def given() -> str | None:
    """Return PREFECT_API_URL, checked; None if it is not set. Writes and starts nothing.

    Raises:
        ValueError: for a value that is not the address of a Prefect API that answers and accepts our password.
    """
    given = os.environ.get("PREFECT_API_URL")
    if not given:
        return None
    if re.match(r"https?://[^/@]*:[^/@]*@", given):
        raise ValueError("PREFECT_API_URL holds a password: take it out and set PREFECT_API_AUTH_STRING to user:password")
    if not re.match(r"https?://[^/]", given):
        raise ValueError(f"PREFECT_API_URL {given!r} is no address of a server: set it to http://HOST:PORT/api")
    url = given.rstrip("/")
    if not _is_api(url):
        if "/api" not in url and _is_api(f"{url}/api"):
            raise ValueError(f"PREFECT_API_URL {given} is the address of the server's pages, not of its API: set it to {url}/api")
        hint = "" if "/api" in url else " (the address of an API is that of the server with /api behind it)"
        raise ValueError(
            f"PREFECT_API_URL {given} does not answer as Prefect's API{hint}: start that server, or unset the variable to have one started here"
        )
    check_password(url)
    return url


def _is_api(url: str) -> bool:
    """Whether the server at url may be Prefect's API. A server that answers with a web page, as it may for any path, is not."""
    try:
        answer = httpx.get(f"{url}/health", timeout=5)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return answer.status_code == httpx.codes.OK and not answer.headers.get("content-type", "").startswith("text/html")


def check_password(api_url: str) -> None:
    """Raises ValueError if a Prefect server refuses the password that we know."""
    with prefect_api.api_client(api_url) as client, contextlib.suppress(httpx.HTTPError):
        if client.get("/admin/version").status_code == httpx.codes.UNAUTHORIZED:
            raise ValueError(
                f"Prefect's server at {api_url} refuses our password: set PREFECT_API_AUTH_STRING to its user:password, or, if it is the "
                "one that `ratchet up` started, end it with `ratchet down`"
            )
