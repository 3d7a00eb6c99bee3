"""Requests to Prefect's server while its database is busy, on a transport that answers by a script."""

import httpx
import pytest

from infra.services import prefect_api

BUSY = httpx.Response(503, text="busy")
DONE = httpx.Response(200, json=["done"])


class Script(httpx.BaseTransport):
    """Gives the answers in turn; None: no answer within the time."""

    def __init__(self, *answers: httpx.Response | None) -> None:
        self.answers = list(answers)
        self.num_requests = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.num_requests += 1
        if (answer := self.answers.pop(0)) is None:
            raise httpx.ReadTimeout("timed out", request=request)
        return answer


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which a pause of one second takes 30."""
    now = [0.0]
    monkeypatch.setattr(prefect_api.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(prefect_api.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 30 * seconds))


def ask(script: Script, method: str = "PATCH", path: str = "/deployments/d") -> object:
    with httpx.Client(transport=script, base_url="http://prefect/api") as client:
        return prefect_api.asked(client, method, path, {"version": "v"})


@pytest.mark.parametrize("before", [(BUSY,), (BUSY, BUSY, BUSY), (None,), (None, BUSY, None)])
@pytest.mark.parametrize(("method", "path"), [("PATCH", "/deployments/d"), ("POST", "/deployments/filter")])
def test_what_changes_nothing_when_sent_twice_is_sent_until_the_database_is_free(
    before: tuple[httpx.Response | None, ...], method: str, path: str
) -> None:
    script = Script(*before, DONE)
    assert ask(script, method, path) == ["done"]
    assert script.num_requests == len(before) + 1


def test_what_may_have_created_something_is_not_sent_again() -> None:
    script = Script(None, DONE)
    with pytest.raises(ValueError, match=r"^Prefect's server gave no answer to POST /automations/ in 90 s$"):
        ask(script, "POST", "/automations/")
    assert script.num_requests == 1


def test_a_server_that_is_busy_for_ever_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^Prefect's server refused PATCH /deployments/d: HTTP 503 busy$"):
        ask(Script(*[BUSY] * 10))
    with pytest.raises(ValueError, match=r"^Prefect's server gave no answer to PATCH /deployments/d in 90 s$"):
        ask(Script(*[None] * 10))


def test_the_wait_for_an_answer_is_longer_than_prefects_own_for_its_database() -> None:
    with prefect_api.api_client("http://prefect/api") as client:
        assert client.timeout.read == prefect_api.ANSWER_S > 60
