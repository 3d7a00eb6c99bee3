"""Show the fields of a run's configuration with type, unit, default and meaning.

ratchet config                                                   all of them
ratchet config trainer.loss                                      those of a section
ratchet config --markdown > docs/configuration.md                the page of the docs
"""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from infra.config.tools.schema import Field

Part = Annotated[str, Parameter(help="A section or field, such as trainer.loss.", show_default=False)]
Markdown = Annotated[bool, Parameter(help="Print the page docs/configuration.md.", negative=())]
HEAD = """\
# Configuration

Every field of a run, read off the models: `ratchet config --markdown > docs/configuration.md` makes this page.

Set one on the command line, `--trainer.learning_rate 3e-5` (`=` works too; `-` stands for `_`), or in a JSON, YAML or TOML file that
`--config` names. A list is one JSON value, or the option is given several times. `--preset NAME` says what to start from, and `--show`
prints each value with its source.
"""


def config(part: Part = "", /, *, markdown: Markdown = False) -> None:
    from infra.config import RunConfig
    from infra.config.tools.overrides import nearest
    from infra.config.tools.schema import fields_of

    found = list(fields_of(RunConfig))
    chosen = [field for field in found if not part or field.name == part or field.name.startswith(f"{part}.")]
    if not chosen:
        sections = {name.rpartition(".")[0] for name in (field.name for field in found)} - {""}
        near = nearest(part, [*(field.name for field in found), *sections])
        raise ValueError(f"field {part!r} does not exist{near}; `ratchet config` lists all")
    if markdown:
        print(page_of(chosen))
        return
    from flows.cli.terminal import console, folded

    for field in chosen:
        console.print(field.name, style="bold", markup=False, soft_wrap=True)
        console.print(folded(field.help, 4), markup=False, soft_wrap=True)


def page_of(fields: "list[Field]") -> str:
    return "\n".join([HEAD, *_sections(fields)]).rstrip()


def _sections(fields: "list[Field]") -> Iterator[str]:
    from infra.config.tools.schema import meaning_of, shown

    for section, members in groupby(fields, key=lambda field: field.name.rpartition(".")[0]):
        yield f"## {section or 'The run'}\n"
        if meaning := meaning_of(section):
            yield f"{_cell(meaning)}\n"
        yield "| field | type | default | meaning |\n|--|--|--|--|"
        for field in members:
            yield f"| `{field.name}` | {_cell(field.kind)} | `{_cell(shown(field.default))}` | {_cell(field.meaning)} |"
        yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
