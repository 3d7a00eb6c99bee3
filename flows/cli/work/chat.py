"""Talk to an adapter of a run in the terminal, through the checked engine.

Each line is a question of its own, put as in training. The GPUs are yours until you end with Ctrl-D; the engine stays up then.

ratchet chat mine                                                the best adapter of the run `mine`
ratchet chat mine --adapter 0 --temperature 0.2                  its base model
echo "What is 2 + 3?" | ratchet chat mine --adapter latest
"""

from typing import Annotated

from cyclopts import Parameter

Adapter = Annotated[str, Parameter(help="best (by the run's evaluations), latest, or a version.", metavar="best|latest|VERSION")]
Temperature = Annotated[float | None, Parameter(help="Of sampling; left out, the run's.", show_default=False)]


def chat(run: str, /, *, adapter: Adapter = "best", temperature: Temperature = None) -> None:
    import sys

    from flows.cli import interrupts
    from flows.cli.session import DOWN
    from flows.cli.terminal import console, log_to_terminal, show_warnings_only
    from infra.colocation.plans import resolve_colocation
    from infra.engines import open_engine
    from infra.engines.conversation import Conversation
    from infra.models import base_model
    from infra.processes.gpu_lock import gpu_lock
    from infra.runs.run_state import config_of
    from tasks.evaluations.find_adapter import named_version
    from tasks.support.preflight import check

    log_to_terminal()
    config = config_of(run)
    sampling = config.sampling.but(group_size=1, **({} if temperature is None else {"temperature": temperature}))
    check(config, ("roll_out",))
    found = named_version(config, adapter)
    interrupts.say(lambda: f"interrupted: the conversation has ended, the engine stays up: {DOWN}")
    with gpu_lock(f"chat with run {run}"):
        engine = open_engine(resolve_colocation(config).engine, found)
        engine.wake()
        engine.load_adapter(found)
        talk = Conversation(engine, config.training, sampling, found, base_model.locate(config.model))
        show_warnings_only()
        console.print(f"adapter {found.version} of run {run}; Ctrl-D ends")
        while question := asked(sys.stdin.isatty()):
            console.print(talk.answer(question), markup=False, soft_wrap=True)


def asked(shows_prompt: bool) -> str:
    """The next line that is not empty; empty at the end of the input."""
    try:
        while not (line := input("> " if shows_prompt else "").strip()):
            pass
    except EOFError:
        return ""
    return line
