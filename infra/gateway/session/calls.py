"""Calls of tools on record: each is in the journal before it is made, so that after a crash no effect is made twice.

    begin    in the journal, then made        result    in the journal, then used

A call is known by its tool, its arguments and how many equal ones the attempt made before it. One with a result on record is not made again.
One without a result may have had its effect: it is made again, with the same key, only where its tool is idempotent.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from infra.gateway.rendering.messages import BadRequest

FIELDS = {"name": str, "arguments": dict, "occurrence": int, "idempotent": bool}
"""Fields of a request to begin a call."""


class CallRefused(RuntimeError):
    """An earlier attempt began this call, and whether it had its effect is not known."""


@dataclass(frozen=True)
class CallRecord:
    """A call of a tool: a line of the turns' journal when it begins, and another one when it has its result."""

    episode: str
    key: str
    """Of this call of this episode alone, and the same when the episode is repeated: a service may take it as idempotency key."""
    name: str
    arguments: Mapping[str, Any]  # Any: JSON
    is_idempotent: bool
    is_done: bool = False
    result: Any = None
    """JSON; where the tool failed, the text that says so."""
    is_error: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it may have had an effect that may not be made again."""
        return not self.is_done and not self.is_idempotent


class Calls:
    """The calls of an episode."""

    def __init__(
        self,
        episode: str,
        on_call: Callable[[CallRecord], object] = lambda call: None,
        recorded: Iterable[CallRecord] = (),
        of: str = "",
    ) -> None:
        """on_call: Called with each record before the call is made, and before its result is used. recorded: Of earlier attempts. of: What the
        episode is of: others have episodes of the same name."""
        self.episode, self.on_call, self.of = episode, on_call, of
        self.by_key = {call.key: call for call in recorded}
        """The latest record of each."""
        self.is_refused = False
        """Whether a call, or a beginning with calls, was refused because it might repeat an effect."""
        self.asked: set[str] = set()
        """Keys of the calls since the episode began."""

    @property
    def is_outcome_unknown(self) -> bool:
        """Whether a call may have had an effect that is not on record or not in this episode, or might have had it twice. True while a call is
        under way."""
        made = [call for call in self.by_key.values() if not call.is_idempotent]
        return self.is_refused or any(call.is_open or call.key not in self.asked for call in made)

    @property
    def errors(self) -> Counter[str]:
        """Number of calls whose result is an error, by tool."""
        return Counter(call.name for call in self.by_key.values() if call.is_error)

    def begin_episode(self, *, restarts: bool) -> None:
        """Note that the episode begins, where restarts is True without its record.

        Raises:
            CallRefused: if that would repeat an effect.
        """
        self.asked.clear()
        made = [call.name for call in self.by_key.values() if not call.is_idempotent]
        if restarts and made:
            self.is_refused = True
            raise CallRefused(f"{made[0]!r} was called, which is not idempotent: the episode may not begin again")
        if restarts:
            self.by_key.clear()

    def begin(self, fields: object) -> CallRecord:
        """Note a call that is about to be made. Returns its record, which is done if an earlier attempt has its result.

        Raises:
            BadRequest: for fields that are no call.
            CallRefused: if the call must not be made again.
        """
        if not isinstance(fields, dict) or {name: type(value) for name, value in fields.items()} != FIELDS:
            raise BadRequest(f"a call has the fields {', '.join(FIELDS)}, not {str(fields)[:200]}")
        name, arguments = fields["name"], fields["arguments"]
        words = json.dumps([self.of, self.episode, name, arguments, fields["occurrence"]], sort_keys=True)
        key = hashlib.sha256(words.encode()).hexdigest()[:32]
        self.asked.add(key)
        if (known := self.by_key.get(key)) is not None:
            if known.is_open:
                self.is_refused = True
                raise CallRefused(f"tool {name!r} was called before, and whether it had its effect is not known")
            return known
        call = CallRecord(self.episode, key, name, arguments, fields["idempotent"])
        self._note(call)
        return call

    def finish(self, fields: object) -> None:
        """Note the result of a call.

        Raises:
            BadRequest: for a call that was not begun, or a request that is no result.
        """
        if not isinstance(fields, dict) or set(fields) != {"key", "result", "is_error"}:
            raise BadRequest("a call's result has the fields key, result and is_error")
        if (call := self.by_key.get(fields["key"])) is None:
            raise BadRequest(f"key {fields['key']!r} is that of no call of this episode")
        self._note(replace(call, is_done=True, result=fields["result"], is_error=bool(fields["is_error"])))

    def _note(self, call: CallRecord) -> None:
        self.on_call(call)
        self.by_key[call.key] = call
