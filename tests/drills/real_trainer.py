"""The real torchrun and the real trainer program, with one point to stop at: rank 0 has written the adapter, the other ranks wait for it. With
the engine's experts it is an earlier one: before their sums are compared, after the last backward pass.

Started as torchrun is, through RATCHET_TRAINER_PYTHON.
"""

import os
import sys
from typing import Any

import points


def main(arguments: list[str]) -> int:
    if arguments[0] != "rank":
        place = arguments.index("infra.megatron")
        os.execv(sys.executable, [sys.executable, *arguments[: place - 1], __file__, "rank", *arguments[place + 1 :]])
    from infra.megatron import __main__ as program
    from infra.megatron.checkpoint import save as checkpoint

    save = checkpoint.save

    def save_and_stop(*args: Any) -> Any:
        saving = save(*args)
        if os.environ.get("RANK", "0") == "0":
            points.reach("train.middle")
        return saving

    checkpoint.save = save_and_stop
    from infra.megatron.program.session import TrainerSession

    check_experts = TrainerSession.check_experts

    def stop_and_check(session: TrainerSession) -> None:
        if session.experts:
            points.reach("train.middle")
        check_experts(session)

    TrainerSession.check_experts = stop_and_check  # type: ignore[method-assign]
    return program.main(arguments[1:])


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
