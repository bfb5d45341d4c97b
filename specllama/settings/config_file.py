"""Settings from flags, environment and files; ``schema.py`` has the table of all settings.

Precedence: a typed flag, then ``SPECLLAMA_<NAME>``, then ``specllama.toml`` in the working folder,
then the user's ``config.toml``, then the model's card (sampling), then the default. ``Settings``
remembers which one won.

    temperature = 0.7
    model = "qwen3-8b"          # keys are the long option names
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from specllama.errors import ConfigError, UsageError
from specllama.files import MOST_BYTES, read_bounded
from specllama.paths import config_file, replace_file
from specllama.settings.hardware import PlaceOptions
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams
from specllama.settings.schema import BY_NAME, DEFAULTS, GONE, SCHEMA
from specllama.settings.setting import Setting, variable_of

PROJECT_FILE = "specllama.toml"
# where texts go, stay or come from: the user's
PERSONAL = ("rpc", "kv-disk", "draft-from", "log-file")
_KINDS: dict[str, tuple[Any, str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (bool, "true or false"),
    "text": (str, "a text"),
    "texts": (tuple[str, ...], "a list of texts"),
}


@dataclass(frozen=True, slots=True)
class Value:
    """A value and its origin: "flag", "SPECLLAMA_X", a file's path, or "default"."""

    value: Any
    origin: str


class Settings:
    """The value of every setting, and its origin."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name].value

    def __iter__(self) -> Iterator[tuple[Setting, Value]]:
        return iter((setting, self._values[setting.name]) for setting in SCHEMA)

    def origin(self, name: str) -> str:
        return self._values[name].origin

    def given(self, name: str) -> Any:
        """Return the value if anyone set it, None if it is only the default."""
        return None if self.origin(name) == "default" else self[name]

    def changes(self) -> dict[str, Value]:
        """Return the values from variables and files; no typed flags, no defaults."""
        return {s.name: v for s, v in self if v.origin not in ("flag", "default")}

    def with_flags(self, typed: Mapping[str, Any]) -> Settings:
        """Return the settings with typed flags on top; check every value."""
        flags = {name: Value(check(name, value), "flag") for name, value in typed.items()}
        return Settings({**self._values, **flags})

    def engine_options(self) -> EngineOptions:
        return EngineOptions(**self._room("engine"), place=PlaceOptions(**self._room("place")))

    def generate_params(self, **changes: Any) -> GenerateParams:
        """Return the parameters of a request; ``changes`` are further GenerateParams fields."""
        sampling = SamplingParams(**self._room("sampling"))
        fields = ((s.field.partition("."), v) for s, v in self)
        left = sorted(f[2] for f, v in fields if f[0] == "sampling" and v.origin == "default")
        own = {"sampling": sampling, "from_card": tuple(left), **self._room("generate")}
        return GenerateParams(**own | changes)

    def _room(self, room: str) -> dict[str, Any]:
        return {
            setting.field.partition(".")[2]: self[setting.name]
            for setting in SCHEMA
            if setting.field.startswith(f"{room}.")
        }


def load_settings(
    *, environ: Mapping[str, str] | None = None, project: Path | None = None
) -> Settings:
    """Read files and environment.

    Args:
        environ: the environment; the process's own unless given (tests).
        project: the project file; ``specllama.toml`` in the working folder unless given.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range; names file and key.
    """
    values = {setting.name: Value(setting.default, "default") for setting in SCHEMA}
    own, shared = config_file(), (project or Path(PROJECT_FILE)).absolute()
    for path in (own, shared):
        for key, raw in read_file(path).items():
            if path == shared and key in PERSONAL:
                raise ConfigError(
                    f"{path}: {key} cannot come from the file of a folder, which others may have "
                    "written: it decides where texts go",
                    f"take the line out; for yourself: specllama config set {key} …",
                )
            values[key] = Value(_checked(key, raw, f"{path}"), str(path))
    given = os.environ if environ is None else environ
    for name in GONE:
        if (variable := variable_of(name)) in given:
            raise ConfigError(f"{variable}: the setting {name} is gone", GONE[name])
    for setting in SCHEMA:
        variable = variable_of(setting.name)
        if (text := given.get(variable)) is not None:
            value = _checked(setting.name, parse_text(setting, text), variable)
            values[setting.name] = Value(value, variable)
    return Settings(values)


def read_file(path: Path) -> dict[str, Any]:
    """Read the keys of a settings file, in kebab case; empty if there is no file.

    Raises:
        ConfigError: it cannot be read, is not TOML, or has a key that never was a setting.
    """
    try:
        with path.open("rb") as file:
            data = read_bounded(file, str(path), MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    import tomllib

    try:
        table = tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    out: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("_", "-").lower()
        try:
            out[name if name in GONE else find(key).name] = value
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", error.hint) from None
    return out


def find(key: str) -> Setting:
    """Find a setting by name, underscores allowed; raise ConfigError with a suggestion."""
    name = key.replace("_", "-").lower()
    if name in BY_NAME:
        return BY_NAME[name]
    if name in GONE:
        raise ConfigError(f"the setting {name} is gone; take it out", GONE[name])
    near = difflib.get_close_matches(name, BY_NAME, n=1)
    hint = f"did you mean {near[0]}?" if near else "to list them: specllama config show --all"
    raise ConfigError(f"there is no setting {key!r}", hint)


def check(name: str, value: Any) -> Any:
    """Convert the value to its proper type.

    Raises:
        UsageError: gone, wrong type, not one of the choices, or out of range.
    """
    setting = find(name)
    value = _typed(setting, value)
    room, _, field = setting.field.partition(".")
    dataclasses.replace(DEFAULTS[room], **{field: value})
    return value


def parse_text(setting: Setting, text: str) -> Any:
    """Read a value from a string: an environment variable or ``config set``."""
    if setting.kind == "bool":
        word = text.strip().lower()
        if word in ("1", "true", "yes", "on"):
            return True
        return False if word in ("0", "false", "no", "off", "") else text
    if setting.name == "model-dirs" and not text.lstrip().startswith("["):
        return [folder for folder in text.split(os.pathsep) if folder]
    if setting.kind == "texts":
        try:
            return json.loads(text) if text.lstrip().startswith("[") else [text]
        except ValueError:
            return [text]
    if setting.kind in ("int", "float"):
        try:
            return int(text) if setting.kind == "int" else float(text)
        except ValueError:
            return text
    return text


def _typed(setting: Setting, value: Any) -> Any:
    if value is None and setting.default is None:
        return None
    if setting.unset is not None and value == setting.unset and type(value) is int:
        return setting.default
    if type(value) is int and setting.name.endswith("gpu-layers"):
        return str(value)
    if isinstance(value, int) and setting.name == "exact":
        return ("off", "on")[value] if value in (0, 1) else str(value)
    kind, words = _KINDS[setting.kind]
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise UsageError(f"{setting.name} must be {words}, got {value!r}") from None


def _checked(name: str, value: Any, origin: str) -> Any:
    try:
        return check(name, value)
    except UsageError as error:
        raise ConfigError(f"{origin}: {error.message}", error.hint) from None


def apply_text(params: GenerateParams, name: str, text: str) -> GenerateParams:
    """Change one parameter of a conversation by the name of its setting; "none" clears it.

    A cleared sampling field is that of the model's card again, else the default.

    Raises:
        UsageError: no such setting, a wrong value, or one that needs the model loaded again.
    """
    setting = find(name)
    room, _, field = setting.field.partition(".")
    none = text.strip().lower() == "none"
    if none and room == "sampling":
        return params.choose(field, None)
    cleared = none and setting.default is None
    value = check(setting.name, None if cleared else parse_text(setting, text))
    if room == "sampling":
        return params.choose(field, value)
    if room != "generate":
        raise UsageError(f"{setting.name} cannot be changed while a model is loaded")
    return params.replace(**{field: value})


def write_setting(path: Path, name: str, value: Any) -> None:
    """Set one key of a settings file, or remove it with None; comments and other lines are kept.

    The file is replaced in one step, so it is never half written.

    Raises:
        ConfigError: the file is damaged, or cannot be written.
    """
    before = read_file(path)
    if value is not None:
        value = check(name, value)
    text = path.read_text("utf-8-sig") if before or path.exists() else ""
    changed = _edited(text, name, None if value is None else _literal(value))
    import tomllib

    wanted = {**before, name: list(value) if isinstance(value, tuple) else value}
    if value is None:
        del wanted[name]
    try:
        ours = {key.replace("_", "-").lower(): v for key, v in tomllib.loads(changed).items()}
    except tomllib.TOMLDecodeError:
        ours = None
    if ours != wanted:
        raise ConfigError(f"{name} in {path} spans several lines", "change it in an editor")
    try:  # write through a link: it may lead to a folder under version control
        replace_file(Path(os.path.realpath(path)), changed.encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def _edited(text: str, name: str, literal: str | None) -> str:
    # Not splitlines(): it also splits at characters that TOML allows within a text.
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if lines == [""]:
        lines = []
    spelled = re.escape(name).replace(r"\-", "[-_]")
    pattern = re.compile(rf"^(\s*\"?{spelled}\"?\s*=\s*)(.*?)(\s+#[^\"']*)?$", re.IGNORECASE)
    for i, line in enumerate(lines):
        if match := pattern.match(line):
            if literal is None:
                del lines[i]
            else:
                lines[i] = f"{match[1]}{literal}{match[3] or ''}"
            break
    else:
        if literal is not None:
            lines.append(f"{name} = {literal}")
    return "\n".join(lines) + "\n" if lines else ""


def _literal(value: Any) -> str:
    """Write a value as TOML. Basic strings of TOML and JSON agree except for DEL."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
