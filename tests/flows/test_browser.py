"""A real browser: pages of another origin, and of a name that was bound again to loopback, do not reach Prefect's API; the form of a
deployment shows the fields of a run.

Needs Chromium and its driver (Debian: `apt-get install chromium chromium-driver`); tests/flows/test_deployments.py sends the same requests
without a browser.
"""

import shutil
import subprocess
import time
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, get_args

import httpx
import pytest
from shared import FIRST_PORT, becomes

from infra.config import ColocationChoice
from infra.services import crash_detection, prefect_password

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: a browser is needed to try what a page can do"
    ),
]
ATTACK = """
const [api, done] = [arguments[0], arguments[arguments.length - 1]];
const said = {};
const tried = async (name, how) => { try { const a = await fetch(api + how.path, how); said[name] = a.status + ' ' + await a.text(); }
                                     catch (error) { said[name] = 'blocked'; } };
(async () => {
  await tried('read', {path: '/flows/filter', method: 'POST', headers: {'Content-Type': 'application/json'}, body: '{}'});
  await tried('write', {path: '/flows/', method: 'POST', body: new Blob(['{"name": "evil"}'])});
  await tried('write without reading', {path: '/flows/', method: 'POST', mode: 'no-cors', body: new Blob(['{"name": "evil-too"}'])});
  await tried('write as JSON', {path: '/flows/', method: 'POST', headers: {'Content-Type': 'application/json'}, body: '{"name": "evil-3"}'});
  done(said);
})();
"""


class Browser:
    """Chromium through its driver's HTTP API (W3C WebDriver)."""

    def __init__(self, driver_url: str) -> None:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP evil.example 127.0.0.1"]
        options = {"binary": shutil.which("chromium"), "args": arguments}
        self.client = httpx.Client(base_url=driver_url, timeout=120)
        made = self.call("POST", "/session", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})
        self.session = f"/session/{made['sessionId']}"
        self.call("POST", f"{self.session}/timeouts", {"script": 60_000})

    def call(self, method: str, path: str, body: dict[str, Any]) -> Any:
        answer = self.client.request(method, path, json=body if method == "POST" else None)
        assert answer.is_success, answer.text
        return answer.json()["value"]

    def attack(self, page: str, api_url: str) -> dict[str, str]:
        """What a script on a page gets from the API."""
        self.call("POST", f"{self.session}/url", {"url": page})
        found = self.call("POST", f"{self.session}/execute/async", {"script": ATTACK, "args": [api_url]})
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        self.call("DELETE", self.session, {})


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    port = FIRST_PORT + 70
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                httpx.get(f"http://127.0.0.1:{port}/status")
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        opened = Browser(f"http://127.0.0.1:{port}")
        yield opened
        opened.close()
    finally:
        driver.terminate()
        driver.wait()


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """A page of another origin."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<title>a page</title>")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://evil.example:{server.server_port}/"
    server.shutdown()


def flows(api_url: str) -> set[str]:
    with crash_detection.api_client(api_url) as client:
        return {flow["name"] for flow in crash_detection.asked(client, "POST", "/flows/filter", {})}


def test_a_page_of_another_origin_gets_nothing_and_changes_nothing(browser: Browser, own_prefect: str, elsewhere: str) -> None:
    before = flows(own_prefect)
    said = browser.attack(elsewhere, own_prefect)
    assert said.pop("write without reading") == "0 "  # the browser hides the answer
    assert said == dict.fromkeys(("read", "write", "write as JSON"), "blocked")
    assert flows(own_prefect) == before


def test_a_name_that_was_bound_again_to_loopback_gets_nothing(browser: Browser, own_prefect: str) -> None:
    """For the browser page and API have one origin then: only the password stands between them."""
    before = flows(own_prefect)
    rebound = own_prefect.replace("127.0.0.1", "evil.example")
    said = browser.attack(rebound.removesuffix("/api"), rebound)
    assert {name: answer.partition(" ")[0] for name, answer in said.items()} == dict.fromkeys(said, "401")
    assert flows(own_prefect) == before


def test_the_servers_own_page_works_with_the_password(browser: Browser, own_prefect: str) -> None:
    page = own_prefect.removesuffix("/api").replace("127.0.0.1", "localhost")  # another of our origins
    browser.call("POST", f"{browser.session}/url", {"url": page})
    auth = prefect_password.of(own_prefect)
    assert auth is not None
    authorization = f"Basic {b64encode(auth.get_secret_value().encode()).decode()}"
    script = """
    const done = arguments[arguments.length - 1];
    const headers = {'Content-Type': 'application/json', 'Authorization': arguments[1]};
    fetch(arguments[0] + '/flows/filter', {method: 'POST', headers, body: '{}'}).then(a => done(a.status), e => done(String(e)));
    """
    said = browser.call("POST", f"{browser.session}/execute/async", {"script": script, "args": [own_prefect, authorization]})
    assert said == 200


FIELD = """
const field = [...document.querySelectorAll('.schema-form-property')].find(each => !each.querySelector('.schema-form-property')
    && each.querySelector('.schema-form-property__label')?.innerText.startsWith(arguments[0]));
if (!field) return null;
const input = field.querySelector('input, textarea');
return {kind: field.querySelector('.p-select') ? 'list' : input?.type, text: field.innerText, value: input?.value,
        choices: [...field.querySelectorAll('.p-select option')].map(each => each.innerText)};
"""


def test_the_form_of_a_step_shows_the_choices_of_each_field(browser: Browser, own_prefect: str) -> None:
    """Of those that were shown as a constant, and as a list in which nothing is chosen."""
    auth = prefect_password.of(own_prefect)
    assert auth is not None
    with crash_detection.api_client(own_prefect) as client:
        deployment = crash_detection.asked(client, "GET", "/deployments/name/rl-step/local", None)["id"]
    pages = own_prefect.removesuffix("/api")

    def script(text: str, *arguments: str) -> Any:
        return browser.call("POST", f"{browser.session}/execute/sync", {"script": text, "args": list(arguments)})

    browser.call("POST", f"{browser.session}/url", {"url": f"{pages}/ico/favicon.svg"})
    secret = b64encode(auth.get_secret_value().encode()).decode()
    script("localStorage.setItem('prefect-password', arguments[0])", secret)
    browser.call("POST", f"{browser.session}/url", {"url": f"{pages}/deployments/deployment/{deployment}/run"})
    assert becomes(lambda: script(FIELD, "Max Staleness") is not None, within_s=120)
    plan, age = script(FIELD, "Colocation"), script(FIELD, "Max Staleness")
    script("localStorage.removeItem('prefect-password')")
    assert plan["kind"] == "list" and "const" not in plan["text"]
    assert all(choice in plan["text"] for choice in get_args(ColocationChoice))
    assert (age["kind"], age["value"]) == ("number", "0")
