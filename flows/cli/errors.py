"""What is said of errors: one plain line, with the name that is nearest to a misspelt one."""

import re

from cyclopts import CycloptsError, UnknownCommandError, UnknownOptionError, UnusedCliTokensError
from cyclopts.exceptions import CoercionError, MissingArgumentError


def line_of(error: CycloptsError) -> str:
    """What was wrong with the words of a command line."""
    from infra.config.tools.overrides import nearest

    command = " ".join(["ratchet", *(error.command_chain or ())])
    match error:
        case UnknownOptionError():
            name = (error.token.keyword or error.token.value).partition("=")[0]
            known = [name for argument in error.argument_collection if argument.parse for name in argument.names]
            return f"option {name} does not exist{nearest(name, known)}; `{command} --help` lists all"
        case UnknownCommandError():
            name = (error.unused_tokens or [""])[0]
            assert error.app is not None
            known = [known for known in error.app if not known.startswith("-")]
            return f"command {name!r} does not exist{nearest(name, known)}; `{command} --help` lists all"
        case UnusedCliTokensError():
            unused = error.unused_tokens or []
            field = next((word for word in unused if re.match(r"[a-z][\w.]*=", word)), None)  # as Hydra has them
            instead = f"a field is an option, --{field}" if field else f"`{command} --help` shows what it takes"
            return f"{' '.join(unused)!r} is one word too many; {instead}"
        case MissingArgumentError() if error.argument is not None:
            lacks = "needs a value" if error.keyword or error.argument.tokens else "is missing"
            return f"{spelling(error)} {lacks}; `{command} --help` shows what it takes"
        case CoercionError() if error.token is not None:
            return f"{spelling(error)} = {error.token.value!r} cannot be: {kind(error)} is needed"
    if isinstance(error.__cause__, ValueError):  # of a model that takes the options' values
        return said(error.__cause__)
    return " ".join(str(error).split())


def spelling(error: MissingArgumentError | CoercionError) -> str:
    """The option, or the word that has a place of its own, as the help writes it."""
    assert error.argument is not None
    name = error.argument.name
    return name if name.startswith("-") else name.upper()


def kind(error: CoercionError) -> str:
    from typing import Literal, get_args, get_origin

    if get_origin(error.target_type) is Literal:
        return " or ".join(map(str, get_args(error.target_type)))
    names = {int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(error.target_type or object, str(getattr(error.target_type, "__name__", error.target_type)))


def said(error: ValueError) -> str:
    """What a wrong value is said to be; of pydantic's findings all, in one line."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        from infra.config.tools.overrides import one_line

        return one_line(error)
    return str(error)


def is_expected(error: RuntimeError | OSError) -> bool:
    """Work that failed and says all in its message: what else is raised is a mistake of ours, and shows its traceback."""
    from infra.failures import is_disk_full
    from infra.processes.children import ProgramFailed

    if isinstance(error, ProgramFailed) or is_disk_full(error):
        return True
    return type(error).__name__ in {
        *("VariantsFailed", "ReplayDiffers", "RemoteError", "NoNodeForEngine"),
        *("DigestMismatch", "Removed"),
    }
