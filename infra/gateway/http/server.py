"""The gateway's server: OpenAI's endpoints on loopback, for the sessions that are open.

It runs in the event loop of the process that owns the rollout: so it samples behind that process's fence, into its journal, and no program
can outlive the rollout or has to be found again after a crash.
"""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Self

import orjson
from aiohttp import web

from infra.engines.interface import TurnRequest, Turns
from infra.failures import EngineRefused, EngineUnavailable, WrongAnswer
from infra.gateway.http import chat_api, completions_api, generate_api, responses_api
from infra.gateway.http.fields import CHAT, COMPLETIONS, GENERATE, RESPONSES, Fields, UnknownModel, checked_fields
from infra.gateway.rendering.interface import ConversationRenderer
from infra.gateway.rendering.messages import BadRequest
from infra.gateway.session.calls import CallRefused, Calls
from infra.gateway.session.records import TurnRecord
from infra.gateway.session.session import Episode, EpisodeEnded, Session, TurnLimits
from infra.gateway.session.snapshots import Snapshots
from infra.gateway.session.turn import Query, TurnAnswer
from infra.store.samples import Sample

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MODEL = "policy"
"""Name of the model that agents ask for: the adapter behind it changes from step to step."""
CALLS, CALL_RESULTS = "/tool_calls", "/tool_calls/results"
"""Paths of our own: see infra/gateway/session/calls.py."""
EPISODES, SNAPSHOTS = "/episodes", "/snapshots"
"""Paths of our own: a worker says that it begins the episode, and how it may go on with it."""
OF_WORKERS = (EPISODES, SNAPSHOTS, CALLS, CALL_RESULTS)
MAX_REQUEST_BYTES = 64 << 20
SSE = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
ENGINE_ERRORS = (EngineUnavailable, EngineRefused, WrongAnswer)


class OpenSession(NamedTuple):
    """What an agent needs: OPENAI_BASE_URL, OPENAI_API_KEY and the name of the model."""

    session: Session
    base_url: str
    api_key: str
    calls: Calls
    snapshots: Snapshots
    model: str = MODEL
    restarts: bool = False
    """Whether an episode that begins again does so without its record."""

    def begin(self) -> Any:  # Any: JSON
        """Begin the episode, again if another worker was lost. Returns the snapshot from which it goes on, or None. Raises CallRefused if
        that would repeat an effect."""
        self.calls.begin_episode(restarts=self.restarts)
        self.session.begin_episode(keeps_turns=not self.restarts)
        return self.snapshots.begin_episode()


class Endpoint(NamedTuple):
    """How one of OpenAI's endpoints is served."""

    fields: tuple[str, ...]
    query: Callable[[Session, Fields], Query]
    answer: Callable[..., dict[str, Any]]
    chunks: Callable[..., Iterable[dict[str, Any]]]
    ends_with_done: bool = True
    names_events: bool = False


ENDPOINTS = {
    "/chat/completions": Endpoint(CHAT, chat_api.chat_query, chat_api.chat_answer, chat_api.chat_chunks),
    "/completions": Endpoint(
        COMPLETIONS, completions_api.completion_query, completions_api.completion_answer, completions_api.completion_chunks
    ),
    "/responses": Endpoint(
        RESPONSES,
        responses_api.response_query,
        responses_api.response_answer,
        responses_api.response_chunks,
        ends_with_done=False,
        names_events=True,
    ),
}

GENERATE_ENDPOINT = Endpoint(GENERATE, generate_api.generate_query, generate_api.generate_answer, generate_api.no_chunks)


class Gateway:
    """Use `serving`."""

    def __init__(
        self, turns: Turns, renderer: ConversationRenderer, limits: TurnLimits, on_turn: Callable[[TurnRecord], object]
    ) -> None:
        self.turns, self.renderer, self.limits, self.on_turn = turns, renderer, limits, on_turn
        self.base_url = ""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises the first error of the engine, after which no turn is sampled."""
        self._sessions: dict[bytes, OpenSession] = {}
        """By the digest of their keys."""

    @classmethod
    @asynccontextmanager
    async def serving(
        cls,
        turns: Turns,
        renderer: ConversationRenderer,
        limits: TurnLimits,
        on_turn: Callable[[TurnRecord], object] = lambda record: None,
    ) -> AsyncIterator[Self]:
        """Serve on a free port until the block ends. An error of the engine is raised at its end.

        on_turn: Called with each complete turn before its agent gets it.
        """
        gateway = cls(turns, renderer, limits, on_turn)
        runner = web.AppRunner(gateway._application(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, 0).start()
            gateway.base_url = f"http://{HOST}:{runner.addresses[0][1]}/v1"
            yield gateway
        finally:
            await asyncio.gather(*(opened.session.close() for opened in gateway._sessions.values()))
            await runner.cleanup()
            gateway.failure.cancel()
        gateway.raise_failure()

    def raise_failure(self) -> None:
        """Raise the engine's error, if there was one."""
        if self.failure.done() and not self.failure.cancelled():
            self.failure.result()

    def open_session(
        self,
        episode: Episode,
        recorded: Sequence[TurnRecord] = (),
        calls: Calls | None = None,
        snapshots: Snapshots | None = None,
        *,
        restarts: bool = False,
    ) -> OpenSession:
        """Return an open session for an episode, with a key of its own.

        recorded: The episode's turns of earlier attempts. calls: Of tools; None: on no record. snapshots: Of the environment; None: on no record.
        """
        key = secrets.token_urlsafe(24)
        session = Session(episode, self.renderer, self.limits, self._sampled, self.on_turn, recorded)
        calls = calls or Calls(episode.key)
        opened = OpenSession(session, self.base_url, key, calls, snapshots or Snapshots(calls), restarts=restarts)
        self._sessions[_digest(key)] = opened
        return opened

    async def _sampled(self, request: TurnRequest) -> Sample:
        if self.failure.done():
            raise EngineUnavailable("the engine failed on an earlier turn: no further turn is sampled")
        try:
            return await self.turns.sample(request)
        except ENGINE_ERRORS as error:
            if not self.failure.done():
                self.failure.set_exception(error)
                self.failure.exception()  # read: it is raised at the end of serving
            raise

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get("/v1/models", self._models)
        for path, endpoint in ENDPOINTS.items():
            app.router.add_post(f"/v1{path}", self._served_by(endpoint))
        app.router.add_post(generate_api.PATH, self._served_by(GENERATE_ENDPOINT))
        for path in OF_WORKERS:
            app.router.add_post(f"/v1{path}", self._of_worker)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        return app

    def _opened(self, request: web.Request) -> OpenSession | None:
        return self._sessions.get(_digest(request.headers.get("Authorization", "").removeprefix("Bearer ")))

    async def _models(self, request: web.Request) -> web.Response:
        if self._opened(request) is None:
            return _wrong_key()
        return _json({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "ratchet"}]})

    async def _of_worker(self, request: web.Request) -> web.Response:
        """Begin an episode; put a snapshot, a tool's call or its result on record."""
        opened = self._opened(request)
        if opened is None:
            return _wrong_key()
        try:
            fields = await _body(request)
            if request.path.endswith(EPISODES):
                return _json({"snapshot": opened.begin()})
            if request.path.endswith(SNAPSHOTS):
                opened.snapshots.save(fields)
                return _json({})
            if request.path.endswith(CALL_RESULTS):
                opened.calls.finish(fields)
                return _json({})
            call = opened.calls.begin(fields)
            return _json({"key": call.key, "is_done": call.is_done, "result": call.result})
        except BadRequest as error:
            return _error(400, str(error), "unsupported_value")
        except CallRefused as error:
            return _error(409, str(error), "outcome_unknown")

    async def _unknown(self, request: web.Request) -> web.Response:
        known = ", ".join(f"/v1{path}" for path in ("/models", *ENDPOINTS, *OF_WORKERS))
        return _error(404, f"{request.method} {request.path} is not served; known are {known}, {generate_api.PATH}", "not_found")

    def _served_by(self, endpoint: Endpoint) -> Callable[[web.Request], Any]:
        async def serve(request: web.Request) -> web.StreamResponse:
            opened = self._opened(request)
            if opened is None:
                return _wrong_key()
            session = opened.session
            try:
                fields = checked_fields(await _body(request), endpoint.fields, MODEL, session.limits.temperature)
                query = endpoint.query(session, fields)
                answer = await session.complete(query, lambda: not _is_gone(request))
            except UnknownModel as error:
                return _error(404, str(error), "model_not_found")
            except BadRequest as error:
                return _error(400, str(error), "unsupported_value")
            except EpisodeEnded as error:
                return _error(400, str(error), "context_length_exceeded" if error.reason == "context" else "episode_ended")
            except ENGINE_ERRORS as error:
                return _error(503, f"the engine failed: {error}", "engine_failed")
            return await self._delivered(request, endpoint, answer, fields)

        return serve

    async def _delivered(
        self, request: web.Request, endpoint: Endpoint, answer: TurnAnswer, fields: Fields
    ) -> web.StreamResponse:
        how: Any = (answer, fields, MODEL, self.renderer.text, int(time.time()))
        response: web.StreamResponse = web.StreamResponse(headers=SSE) if fields.is_stream else _json(endpoint.answer(*how))
        try:
            await response.prepare(request)
            for chunk in endpoint.chunks(*how) if fields.is_stream else ():
                name = f"event: {chunk['type']}\n".encode() if endpoint.names_events else b""
                await response.write(name + b"data: " + orjson.dumps(chunk) + b"\n\n")
            if fields.is_stream and endpoint.ends_with_done:
                await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except ConnectionError:
            return response
        if not _is_gone(request):
            answer.delivered()
        return response


def _is_gone(request: web.Request) -> bool:
    """Whether the agent closed its connection."""
    return request.transport is None or request.transport.is_closing()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def _body(request: web.Request) -> object:
    try:
        return orjson.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise BadRequest(f"the request has more than {MAX_REQUEST_BYTES} bytes: send fewer") from None
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request is no JSON: {error}") from None


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json", headers=headers)


def _wrong_key() -> web.Response:
    return _error(401, "the API key is that of no open session", "invalid_api_key")


def _error(status: int, message: str, code: str) -> web.Response:
    """In OpenAI's form. No error of the gateway passes by itself: clients are told not to repeat the request."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    content = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return _json(content, status, {"x-should-retry": "false"})
