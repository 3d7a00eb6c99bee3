"""The server of a second model that judges: SGLang without adapters, which sleeps while the engine samples and the trainer trains.

release -> NVML confirms -> engine samples, trainer trains -> NVML shows room -> it has answered nothing in its sleep -> resume -> golden check
"""

import logging
import re

from infra.config import EngineConfig
from infra.engines.interface import Release
from infra.engines.server import server_engine, server_process
from infra.engines.server.server_process import ServerState
from infra.engines.sglang.engine import SGLangEngine
from infra.failures import EngineUnavailable, WrongAnswer
from infra.records import AdapterVersion
from infra.store.layout import JUDGE

log = logging.getLogger(__name__)

ANSWERED = re.compile(r"^sglang:num_requests_total(?:{.*})? ([0-9.eE+]+)$")
"""A line of SGLang's metrics: requests that were answered, under one set of labels."""


class JudgeServer(SGLangEngine):
    """An EngineProgram, for version 0 of one base model."""

    def __init__(self, config: EngineConfig, version: AdapterVersion) -> None:
        super().__init__(config, version.base, version.target_modules, replica=JUDGE)

    def load_adapter(self, adapter: AdapterVersion) -> None:
        """Its weights are the base model's."""
        assert not adapter.served_name, "the judge's server has no adapters"

    def release_memory(self) -> Release:
        release = super().release_memory()
        state = server_process.recorded(self.replica)
        if state is not None and not state.is_awake and state.num_answered is None:
            server_process.remember(state.but(num_answered=self._num_answered(state)))
        return release

    def is_asleep(self) -> bool:
        state = server_process.recorded(self.replica)
        if state is None or state.is_awake or not state.is_settled or not server_process.is_alive(state):
            return False
        try:
            self._check_slept(state)
        except EngineUnavailable as error:
            log.warning("the judge's server with pid %d does not answer in its sleep: %s", state.process.pid, error)
            return False
        return True

    def _woken(self, state: ServerState) -> ServerState:
        self._check_slept(state)
        return super()._woken(state).but(num_answered=None)

    def _check_slept(self, state: ServerState) -> None:
        if state.num_answered is None:  # the process that put it to sleep died before this was recorded
            return
        answered = self._num_answered(state) - state.num_answered
        if answered:
            raise WrongAnswer(
                f"the judge's server answered {answered} requests while it should sleep, beside a program to which it had left its memory: "
                "something else woke it",
                {"url": state.url, "answered_in_its_sleep": answered},
            )

    def _num_answered(self, state: ServerState) -> int:
        lines = server_process.metrics_of(state.url, server_engine.CONTROL_TIMEOUT_S)
        return round(sum(float(match[1]) for line in lines if (match := ANSWERED.match(line))))
