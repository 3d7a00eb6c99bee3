"""The worker's side of an episode: a pool of infra.rewards calls `play` as it calls a reward.

    reset(task) -> observation                      ask the gateway for a turn, hand its text to step, and so on
    step(action) -> observation, reward, done

An environment is a class with these two methods, which may be async, or an agent `async def run(task, client)` that returns its reward. Both come
from a user's file. An agent may also be a program. The worker ends with all that they started; see infra.rewards.pool.
"""

import asyncio
import inspect
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from infra.environments.limits import limited
from infra.environments.mcp.servers import McpServers
from infra.environments.parts import AGENT, RESTART, STOP, STOPS, TURN
from infra.environments.program import check_command, run_program
from infra.environments.saving import packed, unpacked
from infra.environments.tools import JOURNAL, CallJournal, ToolLimits, in_episode
from infra.rewards.loading import import_member

LOADED = {"reward": 0.0}
ENDED = ("context_length_exceeded", "episode_ended")
"""Codes of the gateway's errors that end an episode by a limit."""
LIMITS = {"context": "engine.max_context_tokens", "max_turns": "environment.max_turns"}
"""By stop reason: the field whose limit ended an episode."""
CUT = " [...] "
"""Stands for what is left out of an observation that is too long."""
Message = dict[str, Any]


class PlayedEpisode(NamedTuple):
    """What a worker is given."""

    environment: str
    """Its name; empty: a program."""
    task: dict[str, Any] | None
    """None: only check that the environment can be used."""
    base_url: str = ""
    api_key: str = ""
    model: str = ""
    max_turns: int = 1
    turn_timeout_s: float = 60.0
    episode_timeout_s: float = 600.0
    max_observation_tokens: int = 512
    tokenizer: str = ""
    """Path of the model's tokenizer.json."""
    command: Sequence[str] = ()
    """Of a program that plays it."""
    taskset: str = ""
    """Of verifiers; infra/environments/verifiers_tasks/playing.py plays it."""
    repeats_tools: bool = True
    tool_timeout_s: float = ToolLimits().timeout_s
    max_result_characters: int = ToolLimits().max_result_characters
    mcp: Sequence[Sequence[Any]] = ()
    """Fields of its MCP servers."""


class LimitReached(Exception):
    """A limit ended the episode: an agent may catch it, and return the reward that it has. The first argument is a stop reason."""


class Task(dict[str, Any]):  # Any: a row's columns
    """The row that an episode is about: question, answer where the data has one, and all columns."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"the task has no {name!r}; it has {', '.join(self)}")


class ModelClient:
    """The model as an agent sees it: OpenAI's protocol at base_url, with this key and model name."""

    def __init__(self, base_url: str, api_key: str, model: str, timeout_s: float) -> None:
        self.base_url, self.api_key, self.model, self.timeout_s = base_url, api_key, model, timeout_s

    async def chat(self, messages: list[Message], **fields: Any) -> Message:
        """Return the model's next message."""
        return await asyncio.to_thread(self.ask, messages, **fields)

    def ask(self, messages: list[Message], **fields: Any) -> Message:
        """Return the model's next message; for code that is not async.

        Raises:
            LimitReached: if the episode may have no further turn.
        """
        body = json.dumps({"model": self.model, "messages": messages, **fields}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key}"}
        request = urllib.request.Request(f"{self.base_url}/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                message: Message = json.load(response)["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            content = json.load(error).get("error", {})
            if content.get("code") in ENDED:
                raise LimitReached("context" if content["code"] == ENDED[0] else "max_turns") from None
            raise RuntimeError(f"the gateway refused a turn: {content.get('message')}") from None
        return message


def play(*, row: dict[str, Any]) -> dict[str, float]:
    """Play one episode. Returns its reward and, as parts, the reward of each turn and the stop reason."""
    episode = PlayedEpisode(**row)
    found = None if episode.command else _loaded(episode.environment)
    servers = McpServers(episode.mcp, episode.tool_timeout_s)
    if episode.task is None:
        if episode.command:
            check_command(episode.command)
        servers.check()
        restarts, is_agent = getattr(found, "restore", "replay") == "restart", inspect.iscoroutinefunction(found)
        return LOADED | ({RESTART: 1.0} if restarts else {}) | ({AGENT: 1.0} if is_agent else {})
    task = Task(episode.task)
    episode = episode._replace(task=task)
    client = ModelClient(episode.base_url, episode.api_key, episode.model, episode.episode_timeout_s)
    limits = ToolLimits(episode.tool_timeout_s, episode.max_result_characters)
    journal = CallJournal(episode.base_url, episode.api_key, limits)
    snapshot = journal.begin_episode()
    if found is None:
        variables = {"OPENAI_BASE_URL": client.base_url, "OPENAI_API_KEY": client.api_key, "OPENAI_MODEL": client.model}
        return _of_agent(run_program(episode.command, task, variables, episode.episode_timeout_s))
    with in_episode(journal), servers.for_episode():
        return _played(found, episode, client, snapshot)


def _played(found: Any, episode: PlayedEpisode, client: ModelClient, snapshot: Message | None) -> dict[str, float]:
    if inspect.iscoroutinefunction(found):
        return _of_agent(asyncio.run(_run(found, episode, client)))
    return _Game(found(), episode, client).played(snapshot)


async def _run(found: Callable[..., Any], episode: PlayedEpisode, client: ModelClient) -> object:
    """Run an agent to its end. Raises RuntimeError for one that a limit ended before it had a reward, and TimeoutError."""
    try:
        async with asyncio.timeout(episode.episode_timeout_s) as limit:
            return await found(episode.task, client)
    except LimitReached as error:
        field = LIMITS[str(error)]
        problem = (
            f"the episode ended by {field} before run had returned a reward: raise {field}, or catch LimitReached and return one"
        )
        raise RuntimeError(problem).with_traceback(error.__traceback__) from None
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(f"run was not done after environment.episode_timeout_s {episode.episode_timeout_s:g}") from None


class _Game:
    """An episode with reset and step."""

    def __init__(self, environment: Any, episode: PlayedEpisode, client: ModelClient) -> None:
        self.environment, self.episode, self.client = environment, episode, client
        self.deadline = time.monotonic() + episode.episode_timeout_s
        self.limit = min((episode.turn_timeout_s, "turn_timeout_s"), (episode.episode_timeout_s, "episode_timeout_s"))
        """Seconds of a call, and the field that says them."""
        self.rewards: list[float] = []
        self.answers: list[int] = []
        """Positions of the model's answers among the messages."""
        self.loop = asyncio.Runner()
        """Runs methods that are async, one loop for the episode."""

    def played(self, snapshot: Message | None) -> dict[str, float]:
        with closing(self.loop):
            return self._played(snapshot)

    def _played(self, snapshot: Message | None) -> dict[str, float]:
        try:
            messages = self._resumed(snapshot) if snapshot else self._begun()
            stop = self._turns(messages)
        except LimitReached as error:
            if not self.rewards:
                raise ValueError("the first prompt has no room in the context: raise engine.max_context_tokens") from None
            stop = str(error)
        finally:
            if close := getattr(self.environment, "close", None):
                self._timed(close)
        of_turns = {f"{TURN}{number}": reward for number, reward in enumerate(self.rewards)}
        return {"reward": sum(self.rewards), STOP: float(STOPS.index(stop)), **of_turns}

    def _begun(self) -> list[Message]:
        found = self._timed(self.environment.reset, self.episode.task)
        is_with_info = (
            isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)
        )  # as gymnasium's reset returns it
        messages = self._messages(found[0] if is_with_info else found, is_first=True)
        self._save(messages)
        return messages

    def _resumed(self, snapshot: Message) -> list[Message]:
        """Go on where a snapshot was made: the environment gets its state, the gateway is asked again for the turns, which it has on record."""
        messages: list[Message] = snapshot["messages"]
        for position in snapshot["answers"]:
            if self.client.ask(messages[:position]) != messages[position]:
                raise ValueError("the answers on record are not those of its snapshot")
        self.rewards, self.answers = snapshot["rewards"], snapshot["answers"]
        self._timed(self.environment.resume, unpacked(snapshot["state"]))
        return messages

    def _save(self, messages: list[Message]) -> None:
        if getattr(self.environment, "restore", "") == "snapshot" and (journal := JOURNAL.get()):
            state = packed(self._timed(self.environment.snapshot))
            known = {"state": state, "messages": messages, "answers": self.answers, "rewards": self.rewards}
            journal.save(len(self.rewards), known)

    def _turns(self, messages: list[Message]) -> str:
        while len(self.rewards) < self.episode.max_turns:
            if time.monotonic() > self.deadline:
                return "time_out"
            answer = self.client.ask(messages)
            self.answers.append(len(messages))
            messages.append(answer)
            observation, reward, done = _checked_step(self._timed(self.environment.step, answer.get("content") or ""))
            self.rewards.append(reward)
            if done:
                return "done"
            messages += self._messages(observation)
            self._save(messages)
        return "max_turns"

    def _timed(self, function: Callable[..., Any], *arguments: object) -> Any:  # Any: what a user's method returns
        with limited(*self.limit):
            found = function(*arguments)
            return self.loop.run(found) if inspect.iscoroutine(found) else found

    def _messages(self, observation: object, *, is_first: bool = False) -> list[Message]:
        found = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        if not isinstance(found, list) or not all(isinstance(each, dict) and "role" in each for each in found) or not found:
            raise ValueError(f"an observation must be a text or a list of messages, not {observation!r:.200}")
        return found if is_first else [each | {"content": self._cut(each.get("content"))} for each in found]

    def _cut(self, content: object) -> object:
        """Cut the middle out of an observation of more than max_observation_tokens."""
        most = self.episode.max_observation_tokens
        if not isinstance(content, str) or len(content.encode()) <= most:  # a token has at least one byte
            return content
        encoded = _tokenizer(self.episode.tokenizer).encode(content, add_special_tokens=False)
        if len(encoded.ids) <= most:
            return content
        begin, end = encoded.offsets[most // 2 - 1][1] if most > 1 else 0, encoded.offsets[-(most // 2)][0]
        return f"{content[:begin]}{CUT}{content[end:]}"


def _checked_step(found: object) -> tuple[object, float, bool]:
    """Read what step returned: observation, reward, done; skyrl-gym's dict with observations, reward and done; or gymnasium's five, of which
    either `terminated` or `truncated` ends the episode."""
    if isinstance(found, dict):
        found = (found.get("observations", found.get("observation")), found.get("reward"), found.get("done"))
    if not isinstance(found, tuple) or len(found) < 3:
        raise ValueError(f"step must return observation, reward, done, not {found!r:.200}")
    observation, reward, done = found[0], found[1], found[2] or (len(found) == 5 and found[3])
    if not isinstance(reward, int | float) or not abs(float(reward)) < float("inf"):
        raise ValueError(f"step returned reward {reward!r:.80}, a finite number is needed")
    return observation, float(reward), bool(done)


def _of_agent(value: object) -> dict[str, float]:
    if isinstance(value, dict):
        return {**value, STOP: 0.0}
    if not isinstance(value, int | float):
        raise ValueError(f"run returned {value!r:.200}: its reward is needed, a number or a dict with one named reward")
    return {"reward": float(value), STOP: 0.0}


@cache
def _loaded(name: str) -> Any:  # Any: a user's class or function
    """Import an environment. Raises ValueError for one that cannot be used."""
    found = import_member(name, "environment")
    is_game = inspect.isclass(found) and callable(getattr(found, "reset", None)) and callable(getattr(found, "step", None))
    if not is_game and not inspect.iscoroutinefunction(found):
        raise ValueError(
            f"environment {name!r} is no class with reset(task) and step(action), and no async def run(task, client)"
        )
    if is_game:
        _check_call(name, found, "{}()")
        for method, argument in (("reset", "task"), ("step", "action")):
            if inspect.isfunction(inspect.getattr_static(found, method)):
                _check_call(name, getattr(found, method), f"{{}}(self, {argument})", None, None)
    else:
        _check_call(name, found, "{}(task, client)", None, None)
    restore = getattr(found, "restore", "replay")
    if restore not in ("replay", "restart", "snapshot"):
        raise ValueError(f"environment {name!r} has restore {restore!r}, must be 'replay', 'restart' or 'snapshot'")
    if restore == "snapshot" and not all(callable(getattr(found, method, None)) for method in ("snapshot", "resume")):
        raise ValueError(f"environment {name!r} has restore 'snapshot', which needs methods snapshot() and resume(state)")
    return found


def _check_call(name: str, function: Callable[..., Any], form: str, *arguments: object) -> None:
    """Raises ValueError for a function or class that cannot be called so. form: The call as an error says it."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"environment {name!r} cannot be called as {form.format(function.__name__)}, with nothing else: {error}"
        ) from None
    except ValueError:  # one without a signature, such as a class of an extension
        return


@cache
def _tokenizer(path: str) -> Any:  # Any: tokenizers has no types
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(Path(path)))
