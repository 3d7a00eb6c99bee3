"""A real browser: pages of another origin, and of a name that was bound again to loopback, do not reach Prefect's API; the forms of
the deployments are one screen and make the runs that they show.

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

from flows.parameters import resolved
from flows.presets import smoke
from infra.config import ColocationChoice
from infra.services import prefect_api, prefect_password

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
    with prefect_api.api_client(api_url) as client:
        return {flow["name"] for flow in prefect_api.asked(client, "POST", "/flows/filter", {})}


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


# What Prefect's page is made of: a field is a `.group` with a label, a choice or a section a row of buttons.
FIND = """
const field = [...document.querySelectorAll('.group')].filter(each =>
    each.querySelector('label')?.innerText.split(' ')[0] === arguments[0]).pop();
const input = field?.querySelector('input, textarea');
const press = each => { each.dispatchEvent(new MouseEvent('mousedown', {bubbles: true, button: 0})); each.click(); };
"""
PRESS = f"""{FIND} const found = [...(field?.querySelectorAll('button') ?? [])].find(each => each.innerText.trim() === arguments[1]);
if (found) press(found); return !!found;"""
OPEN_LIST = f"{FIND} press(field.querySelector('[role=combobox], [aria-label^=Select]')); return true;"
CHOICES = "return [...document.querySelectorAll('[role=option]')].map(each => each.innerText);"
INPUT = f"{FIND} return input && {{'type': input.type, 'value': input.value}};"
ELEMENT = f"{FIND} return input;"
BOTTOM = f"{FIND} return field?.getBoundingClientRect().bottom;"
SUBMIT = "[...document.querySelectorAll('button')].find(each => each.innerText === 'Submit').click(); return true;"
WEB_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of an element in WebDriver's answers."""
SCREEN = (1280, 900)


class Form:
    """The form of a deployment in Prefect's default pages."""

    def __init__(self, browser: Browser, api_url: str, name: str) -> None:
        self.browser, self.api_url = browser, api_url
        auth = prefect_password.of(api_url)
        assert auth is not None
        with prefect_api.api_client(api_url) as client:
            self.deployment = prefect_api.asked(client, "GET", f"/deployments/name/{name}", None)
        pages = api_url.removesuffix("/api")
        browser.call("POST", f"{browser.session}/url", {"url": f"{pages}/ico/favicon.svg"})
        secret = b64encode(auth.get_secret_value().encode()).decode()
        self.script("localStorage.setItem('prefect-password', arguments[0])", secret)
        browser.call("POST", f"{browser.session}/url", {"url": f"{pages}/v2/deployments/deployment/{self.deployment['id']}/run"})
        assert becomes(lambda: self.script(BOTTOM, "config") is not None, within_s=120), name

    def script(self, text: str, *arguments: str) -> Any:
        return self.browser.call("POST", f"{self.browser.session}/execute/sync", {"script": text, "args": list(arguments)})

    def press(self, field: str, button: str) -> None:
        assert becomes(lambda: self.script(PRESS, field, button), within_s=60), f"{field} has no button {button}"

    def type(self, field: str, text: str) -> None:
        assert becomes(lambda: self.script(INPUT, field) is not None, within_s=60), f"{field} is not shown"
        element = self.script(ELEMENT, field)[WEB_ELEMENT]
        self.browser.call("POST", f"{self.browser.session}/element/{element}/value", {"text": text})

    def choices(self, field: str) -> list[str]:
        assert becomes(lambda: not self.script(CHOICES), within_s=60), "the list of another field stays open"
        self.script(OPEN_LIST, field)
        assert becomes(lambda: bool(self.script(CHOICES)), within_s=60), f"{field} has no list"
        return [str(each) for each in self.script(CHOICES)]

    def submit(self) -> dict[str, Any]:
        """Return the parameters of the flow run that the form makes. Retries while the server's database is busy."""
        made: list[dict[str, Any]] = []
        time.sleep(3)  # the page hands a value on from section to section, a rendering each
        query = {"deployments": {"id": {"any_": [self.deployment["id"]]}}}

        def is_made() -> bool:
            if self.script("return location.pathname").endswith("/run"):
                self.script(SUBMIT)
                time.sleep(3)
            with prefect_api.api_client(self.api_url) as client:
                made[:] = prefect_api.asked(client, "POST", "/flow_runs/filter", query)
            return bool(made)

        assert becomes(is_made, within_s=120), "no flow run was made"
        parameters = made[0]["parameters"]
        assert isinstance(parameters, dict)
        return parameters


NEEDED = {"replay-step/local": {"run": "smoke", "step": "0"}}
"""What a form needs besides a name."""


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("rl-run/arithmetic", "arithmetic"),
        ("rl-run/gsm8k-1gpu", "gsm8k-qwen2.5-0.5b"),
        ("rl-run/gsm8k-7b", "gsm8k-qwen2.5-7b"),
        ("rl-run/local", "auto"),
        ("rl-step/local", "auto"),
        ("rl-sweep/local", "auto"),
        ("evaluate/local", "auto"),
        ("replay-step/local", None),
        ("compare-engines/local", None),
    ],
)
def test_the_form_of_each_deployment_is_one_screen_and_makes_a_run(
    browser: Browser, own_prefect: str, name: str, preset: str | None
) -> None:
    width, height = SCREEN
    browser.call("POST", f"{browser.session}/window/rect", {"width": width, "height": height})
    form = Form(browser, own_prefect, name)
    assert form.script(BOTTOM, "config") < height
    for field, text in {"name": "by-form", **NEEDED.get(name, {})}.items():
        form.type(field, text)
    parameters = form.submit()
    assert (parameters["name"], parameters.get("preset"), parameters["config"]) == ("by-form", preset, None)
    if name == "replay-step/local":
        assert (parameters["run"], parameters["step"], parameters["from_task"]) == ("smoke", 0, "train")


def test_fields_that_are_changed_in_the_form_are_those_of_the_run(browser: Browser, own_prefect: str) -> None:
    form = Form(browser, own_prefect, "rl-run/smoke")
    for section in ("config", "data", "trainer", "loss", "correction", "engine"):
        form.press(section, "change")
    form.type("num_prompts", "4")
    form.press("max_mismatch", "none")
    form.press("deterministic", "set")
    assert form.choices("deterministic") == ["true", "false"]
    form.script("[...document.querySelectorAll('[role=option]')].find(each => each.innerText === 'false').click()")
    assert form.script(INPUT, "max_staleness") == {"type": "number", "value": ""}
    assert form.choices("colocation") == [*get_args(ColocationChoice)]
    form.script("[...document.querySelectorAll('[role=option]')].find(each => each.innerText === 'restart').click()")
    parameters = form.submit()
    assert parameters["preset"] == "smoke"
    base = smoke()
    assert resolved(**parameters) == base.but(
        data=base.data.but(num_prompts=4),
        trainer=base.trainer.but(max_mismatch=None),
        engine=base.engine.but(deterministic=False, colocation="restart"),
    )


def test_a_name_that_cannot_be_is_refused_in_the_form(browser: Browser, own_prefect: str) -> None:
    form = Form(browser, own_prefect, "rl-step/local")
    form.type("name", "my run")
    form.script(SUBMIT)
    assert becomes(lambda: "'my run' does not match" in form.script("return document.body.innerText"), within_s=60)
