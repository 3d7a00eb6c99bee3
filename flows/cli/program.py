"""The commands of `ratchet`: where each one lies, and how its words are read and its help is shown.

A command's file begins with what its help shows: one sentence, more where it is needed; its last paragraph are its examples.
"""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App, Group
from cyclopts.argument import ArgumentCollection
from rich.console import Console

from flows.cli.help import PlainHelp

if TYPE_CHECKING:
    from flows.cli.fields import Chosen

WORK, LOOK = Group("Make and change runs", sort_key=1), Group("Look", sort_key=2)
SERVICES, OTHERS = Group("Servers and this machine", sort_key=3), Group("Besides", sort_key=4)
COMMANDS: dict[str, tuple[Group, str]] = {
    "step": (WORK, "work.step"),
    "run": (WORK, "work.run"),
    "sweep": (WORK, "work.sweep"),
    "evaluate": (WORK, "work.evaluate"),
    "replay": (WORK, "work.replay"),
    "compare-engines": (WORK, "work.compare_engines"),
    "export": (WORK, "work.export"),
    "upload": (WORK, "work.upload"),
    "chat": (WORK, "work.chat"),
    "drop": (WORK, "work.drop"),
    "rm": (WORK, "work.rm"),
    "runs": (LOOK, "look.runs"),
    "show": (LOOK, "look.show"),
    "logs": (LOOK, "look.logs"),
    "presets": (LOOK, "look.presets"),
    "config": (LOOK, "look.config"),
    "data": (LOOK, "look.data"),
    "simulate": (LOOK, "look.simulate"),
    "plan": (LOOK, "look.plan"),
    "du": (LOOK, "look.du"),
    "completion": (LOOK, "look.completion"),
    "quickstart": (SERVICES, "services.quickstart"),
    "up": (SERVICES, "services.up"),
    "down": (SERVICES, "services.down"),
    "status": (SERVICES, "services.status"),
    "stop": (SERVICES, "services.stop"),
    "doctor": (SERVICES, "services.doctor"),
}
"""Group and module, under flows.cli, by name; the function has the module's name."""
ABOUT = "Post-train language models by reinforcement learning, in steps that are whole or not there at all."
EXAMPLES = """\
ratchet quickstart                                          one whole step of a tiny model, from nothing
ratchet run --preset arithmetic --num_steps 20              a training run in this terminal
ratchet runs                                                what there is, and how far it came"""
EXIT_CODES = (
    "Exit codes: 0 success; 1 the work failed; 2 wrong input, said in one line `error: ...` on stderr; 130, 143 or 129 interrupted by "
    "Ctrl-C, SIGTERM or a closed terminal."
)


def program() -> App:
    app = App(
        name="ratchet",
        help=ABOUT,
        help_epilogue=f"Examples:\n{indented(EXAMPLES)}\n\n{EXIT_CODES}",
        version=lambda: version("ratchet"),
        group_commands=OTHERS,
        group_parameters=Group("Options", sort_key=0),
        console=Console(highlight=False, soft_wrap=True),
        help_format="plaintext",
        help_formatter=PlainHelp(),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    for name, (group, module) in COMMANDS.items():
        about, examples = page_of(module)
        epilogue = f"Examples:\n{indented(examples)}\n\n{EXIT_CODES}"
        path = f"flows.cli.{module}:{module.rpartition('.')[2]}"
        app.command(path, name=name, group=group, help=about, help_epilogue=epilogue)
    return app


def page_of(module: str) -> tuple[str, str]:
    """What a command's file says of it, and its examples; it is read and not imported."""
    path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    _, text, _ = path.read_text().split('"""', 2)
    about, _, examples = text.strip().rpartition("\n\n")
    return about, examples


def indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def invoke(words: Sequence[str]) -> None:
    """Run a command. Raises CycloptsError for words that name none, or that it does not take."""
    app = program()
    app(declared(app, words))


def chosen_by(words: Sequence[str]) -> "Chosen":
    """What the words of a command line say of its configuration; nothing is run. Raises as `invoke` does."""
    app = program()
    command, bound, _ = app.parse_args(declared(app, words), exit_on_error=False, print_error=False)
    chosen: Chosen = command.split(bound.kwargs)[0]  # type: ignore[attr-defined]
    return chosen


def declared(app: App, words: Sequence[str]) -> list[str]:
    """The same words with each option as its command declares it."""
    _, apps, left = app.parse_commands(list(words))
    command = list(words)[: len(words) - len(left)]
    if command and not command[-1].startswith("-"):  # else it is --help, a command to cyclopts
        left = spelled_out(left, apps[-1].assemble_argument_collection())
    return [*command, *left]


def spelled_out(words: Sequence[str], known: ArgumentCollection) -> list[str]:
    """The same words with each option as it is declared: `_` and `-` are one, and a bool that stands alone is true."""
    names = {name.replace("_", "-"): name for argument in known for name in argument.names}
    bools = {name for argument in known if argument.parameter.metavar == "true|false" for name in argument.names}
    spelled: list[str] = []
    for number, word in enumerate(words):
        if word == "--":
            return [*spelled, *words[number:]]
        option, equals, value = word.partition("=")
        name = names.get(option.replace("_", "-"), option) if option.startswith("--") else option
        stands_alone = not equals and (number + 1 == len(words) or words[number + 1].startswith("-"))
        spelled.append(f"{name}=true" if name in bools and stands_alone else f"{name}{equals}{value}")
    return spelled
