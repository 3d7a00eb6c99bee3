"""Names of runs, experiments and sweeps: each is a folder's name and part of a URL."""

import re
from typing import Annotated

from pydantic import Field

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
NAME_PATTERN = rf"^{RUN_NAME.pattern}$(?!\n)"
"""The same for a JSON schema, such as that of Prefect's form. `$` alone lets a line break at the end pass in Python."""
NameInForm = Annotated[str, Field(json_schema_extra={"pattern": NAME_PATTERN})]
"""A name that the form refuses before a flow run is made. Validators say in words what is wrong, hence no Field(pattern=...)."""


def checked_name(name: str, what: str) -> str:
    """Raises ValueError for a name that cannot be that of a folder and part of a URL."""
    if not RUN_NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} must be 1 to 80 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    return name
