"""Options read off a configuration's model: one for each field, in groups, the ten most used first; and what they come to.

`--trainer.learning_rate 3e-5`, or with `=`. A list is one JSON value, or the option is given several times.
"""

import inspect
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from cyclopts import Group, Parameter

from flows.cli import terminal
from infra.config import RunConfig
from infra.config.sections.data import FILE_KINDS
from infra.config.sections.environments import taskset
from infra.config.sections.rewards.reward import RUBRIC_KINDS
from infra.config.tools import reward_file
from infra.config.tools.base import ConfigBase
from infra.config.tools.overrides import changed, changed_by, flattened, read_config_file
from infra.config.tools.schema import Field, FieldSource, fields_of, meaning_of, origins

MOST_USED = (
    *("name", "model", "num_steps", "data.source", "data.num_prompts", "sampling.group_size", "sampling.max_output_tokens"),
    *("reward.name", "trainer.learning_rate", "evaluation.every"),
)
"""Fields of a run that stand first in the help."""
PREFIX = "field_"
LOCAL = (
    *("model", "data.source", "data.template", "evaluation.source", "trainer.lora.start_from"),
    *("reward.judge.rubric", "reward.model.path"),
)
"""Fields that may name a local file or folder."""
SOURCES = "data.sources"
"""A list of what data.source may be, with options."""
SETS = "evaluation.sets"
"""A list of sets, each an object or text with options."""
INSPECT = "inspect"
"""Of a set: a task of inspect-ai, FILE.py@TASK or PACKAGE/TASK."""
TASKSET = "environment.id"
OF_SET = {
    "source": "data.source",
    "sources": SOURCES,
    "template": "data.template",
    "reward": reward_file.FIELD,
    "environment": reward_file.ENVIRONMENT,
    "inspect": INSPECT,
}
"""Fields of a set that may name a local file -> the field as which they do."""
MADE_HERE = ("tiny", "small", "arithmetic", "chat", "raw")
"""Their values that name no file, wherever the command runs."""
LOCAL_KINDS = (*FILE_KINDS, ".jinja", ".j2", *RUBRIC_KINDS)
NOT_TEXT = ("list of int", "list of float", "list of bool")
BOOL_VALUE = "true|false"


class Chosen(NamedTuple):
    """What a command line says of a configuration."""

    preset: str | None
    file: Path | None
    changes: tuple[str, ...]
    """FIELD=JSON, in the order of the model."""

    def run(self, preset: str, base: RunConfig | None = None) -> tuple[RunConfig, list[FieldSource]]:
        """The configuration of a run, and where its values come from.

        preset: What to start from where neither a preset nor a file is named.
        base: The configuration of an existing run, which stands in for a preset.

        Raises:
            ValueError: for a value that does not fit, or a preset or file that is not there.
        """
        from flows.presets import preset as named

        if base is not None and self.preset:
            raise ValueError(f"--preset {self.preset} and an existing run: name one of them")
        if base is None:
            base = RunConfig() if self.file and not self.preset else named(self.preset or preset)
        content = self._content()
        config = changed(changed_by(base, content), list(self.changes))
        return config, origins(config, base, {change.partition("=")[0] for change in self.changes}, content)

    def made_from(self, preset: str) -> str | None:
        """Return the name of the preset that `run` starts from. None: it starts from the defaults and a file."""
        return self.preset or (None if self.file else preset)

    def other(self, base: ConfigBase) -> Any:  # Any: of the type of base
        """The same for a configuration that is not a run's and has no presets."""
        return changed(changed_by(base, self._content()), list(self.changes))

    def _content(self) -> dict[str, Any]:
        """The fields of the file by their dotted names, with local paths from where the command runs."""
        content = flattened(read_config_file(self.file) if self.file else {})
        return {name: _value_from_here(name, value) for name, value in content.items()}


def from_here(field: str, text: str) -> str:
    """A value with the absolute path where it names a local file: the worker, which works in another folder, finds it too."""
    if (name := taskset.taskset_of(text)) is not None:
        return taskset.SOURCE + taskset.absolute(name, Path.cwd())
    if field in (reward_file.FIELD, reward_file.ENVIRONMENT):
        return reward_file.absolute(text, Path.cwd(), field)
    if field == TASKSET:
        return taskset.absolute(text, Path.cwd())
    if field == reward_file.MCP:
        return reward_file.absolute_server(text, Path.cwd())
    if field == INSPECT:
        file, mark, task = text.partition("@")
        return os.path.abspath(os.path.expanduser(file)) + mark + task if file.endswith(".py") else text
    if field == SETS:
        return _set_from_here(text)
    if field == SOURCES:
        source, mark, options = text.partition("?")
        return from_here("data.source", source) + mark + options
    if field not in LOCAL or text in MADE_HERE or not text:
        return text
    path = os.path.expanduser(text)  # of a text that is no path, such as a long rubric, Path.expanduser and exists may raise
    return os.path.abspath(path) if path.endswith(LOCAL_KINDS) or os.path.exists(path) else text


def _set_from_here(text: str) -> str:
    """A set with the absolute path of its source; any other text unchanged."""
    name, _, options = text.partition("?")
    pairs = [(option, from_here(OF_SET.get(option, ""), value)) for option, value in parse_qsl(options, keep_blank_values=True)]
    return f"{name}?{urlencode(pairs)}" if pairs else name


def _set_fields_from_here(fields: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
    changed = dict(fields)
    if isinstance(data := fields.get("data"), dict):
        changed["data"] = {name: _value_from_here(OF_SET.get(name, ""), value) for name, value in data.items()}
    reward = fields.get("reward")
    if isinstance(reward, str):
        changed["reward"] = from_here(reward_file.FIELD, reward)
    elif isinstance(reward, dict) and isinstance(reward.get("name"), str):
        changed["reward"] = reward | {"name": from_here(reward_file.FIELD, reward["name"])}
    if isinstance(inspect := fields.get("inspect"), str):
        changed["inspect"] = from_here(INSPECT, inspect)
    environment = fields.get("environment")
    if isinstance(environment, str):
        changed["environment"] = from_here(reward_file.ENVIRONMENT, environment)
    elif isinstance(environment, dict):
        changed["environment"] = {name: _value_from_here(f"environment.{name}", each) for name, each in environment.items()}
    return changed


def _value_from_here(field: str, value: Any) -> Any:  # Any: JSON
    if field == SETS and isinstance(value, dict):
        return _set_fields_from_here(value)
    if field == reward_file.FUNCTIONS and isinstance(value, list):
        return reward_file.absolute_functions(value, Path.cwd())
    if field == reward_file.COMMAND and isinstance(value, list) and all(isinstance(word, str) for word in value):
        return reward_file.absolute_command(value, Path.cwd())
    if isinstance(value, list):
        return [_value_from_here(field, item) for item in value]
    return from_here(field, value) if isinstance(value, str) else value


Command = Callable[..., None]


def takes_fields(
    model: type[ConfigBase],
    *,
    preset: bool = True,
    file: bool = True,
    show: bool = False,
    logs: bool = True,
    leaves_out: Sequence[str] = (),
) -> Callable[[Command], Command]:
    """Give a command an option for each field of a model; it gets them as `chosen`.

    preset, file, show: Whether it has the options --preset, --config and --show too.
    logs: Whether it has the options --verbose, --quiet and --log-json, for its log lines.
    leaves_out: Fields for which the command has an option of its own.
    """

    def decorate(command: Command) -> Command:
        fields = [field for field in fields_of(model) if field.name not in leaves_out]

        def split(options: dict[str, Any]) -> tuple[Chosen, dict[str, Any]]:
            """What the words said of fields, and the command's own options."""
            rest = dict(options)
            preset, file = rest.pop("preset", None), rest.pop("config", None)
            texts = {each: found for each in fields if (found := rest.pop(_key(each), None)) is not None}
            return Chosen(preset, file, tuple(f"{each.name}={value_of(each, found)}" for each, found in texts.items())), rest

        def with_options(*args: Any, **options: Any) -> None:
            chosen, own_options = split(options)
            if logs:
                terminal.choose(**{name: own_options.pop(name, False) for name in _LOGS})
            command(*args, chosen=chosen, **own_options)

        own = [each for each in inspect.signature(command).parameters.values() if each.name not in ("chosen", "show")]
        shared = [_PRESET] * preset + [_CONFIG] * file + [_SHOW] * show + [*_LOGS.values()] * logs
        parameters = [*own, *shared, *(_option(each, model) for each in in_order(fields, model))]
        with_options.__doc__ = command.__doc__
        with_options.split = split  # type: ignore[attr-defined]
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {each.name: each.annotation for each in parameters}
        return with_options

    return decorate


def in_order(fields: Sequence[Field], model: type[ConfigBase]) -> list[Field]:
    """The most used first, then those of no section, then section by section."""
    if model is not RunConfig:
        return sorted(fields, key=lambda field: "." in field.name)
    first = sorted((field for field in fields if field.name in MOST_USED), key=lambda field: MOST_USED.index(field.name))
    return [*first, *(field for field in fields if field.name not in MOST_USED)]


def value_of(field: Field, texts: Sequence[str]) -> str:
    """The value as JSON or text: of a list all that was given, of anything else the last."""
    if not field.type.startswith("list of "):
        return from_here(field.name, texts[-1])
    if len(texts) == 1 and (texts[0] == "null" or texts[0].lstrip().startswith("[")):
        listed = _value_of_json(texts[0])
        return texts[0] if listed is None else json.dumps(_value_from_here(field.name, listed))
    return json.dumps(_value_from_here(field.name, [_item(field, text) for text in texts]))


def _value_of_json(text: str) -> Any:  # Any: JSON
    """None for text that is none, which the configuration's own check names."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _item(field: Field, text: str) -> object:
    if not field.type.startswith(NOT_TEXT):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _key(field: Field) -> str:
    return PREFIX + field.name.replace(".", "__")


def _option(field: Field, model: type[ConfigBase]) -> inspect.Parameter:
    about = Parameter(
        name=f"--{field.name}",
        help=field.help,
        group=_group(field, model),
        metavar=BOOL_VALUE if field.type == "bool" else "VALUE",
        negative=(),
        show_default=False,
    )
    return inspect.Parameter(
        _key(field), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[str] | None, about]
    )


def _group(field: Field, model: type[ConfigBase]) -> Group:
    section = field.name.rpartition(".")[0]
    if model is RunConfig and field.name in MOST_USED:
        return Group("Fields that are set most", sort_key=1)
    meaning = meaning_of(section, model)
    return Group(
        f"Fields of {section}" if section else "Other fields", help=meaning if section else "", sort_key=3 if section else 2
    )


def _shared(name: str, kind: Any, default: object, help: str, **more: Any) -> inspect.Parameter:
    about = Parameter(help=help, show_default=False, negative=(), **more)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about])


_PRESET = _shared("preset", str | None, None, "Named configuration to start from; `ratchet presets` lists them.", metavar="NAME")
_CONFIG = _shared("config", Path | None, None, "File (JSON, YAML or TOML) with fields; options win over it.", metavar="FILE")
_SHOW = _shared("show", bool, False, "Print the configuration with its sources, and do nothing.")
_LOGS = {
    "verbose": _shared("verbose", bool, False, "Print all log lines of the tasks, not one for each step.", alias="-v"),
    "quiet": _shared("quiet", bool, False, "Print warnings, errors and the result only.", alias="-q"),
    "log_json": _shared("log_json", bool, False, "Print a JSON object on each line: time, level, logger, message."),
}
"""By the names of `terminal.choose`."""
