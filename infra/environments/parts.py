"""Names by which a worker returns an episode's figures, as parts of its reward."""

from typing import get_args

from infra.trajectories.segments import StopReason

TURN = "turn "
"""Before the number of a turn: its reward."""
STOP = "stop reason"
"""Position of the stop reason in STOPS."""
RESTART = "restart"
"""The environment declares restore = "restart"."""
AGENT, HARNESS = "agent", "harness"
"""Of a check, who plays: an agent in Python; a harness of the taskset's own."""
TOOL_ERRORS = "tool_errors/"
"""Before the name of a tool: how many of its results are errors."""
STOPS: tuple[StopReason, ...] = get_args(StopReason)
