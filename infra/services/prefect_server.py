"""How our Prefect server is started: its command and its environment."""

import os
from urllib.parse import urlsplit

from infra.services import prefect_password
from infra.settings import LOOPBACK, main_python, settings
from infra.store.layout import Workspace


def command(url: str) -> list[str]:
    """Return the server's command line. url: Address of its API."""
    port = urlsplit(url).port
    return [str(main_python()), "-m", "prefect", "server", "start", "--host", settings().host, "--port", str(port)]


def environment(url: str) -> dict[str, str]:
    """Return the environment of a server whose API is at url, with its password and the origins from which a browser may call it."""
    database = settings().prefect_database
    return ({"PREFECT_API_DATABASE_CONNECTION_URL": database.get_secret_value()} if database else {}) | {
        "PREFECT_HOME": str(Workspace.here().prefect),
        "PREFECT_SERVER_API_AUTH_STRING": prefect_password.ensure(url).get_secret_value(),
        # Without it, pages of any origin may read the answers.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": os.environ.get("PREFECT_SERVER_CORS_ALLOWED_ORIGINS") or ",".join(origins(url)),
        "PREFECT_SERVER_UI_API_URL": url,  # otherwise the page expects its API on port 4200
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # The default keeps leases in memory, and a restarted server never frees them.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    }


def origins(url: str) -> list[str]:
    """Return the origins of the server's own pages: its address, and the names of loopback."""
    parts = urlsplit(url)
    return [f"http://{host}:{parts.port}" for host in dict.fromkeys((parts.hostname, LOOPBACK, "localhost"))]
