"""What the configuration and the policy file have in common: reading TOML, the forms of values, sentences of problems.

A file is checked as a whole: every problem is one sentence with the path of its key and what would be allowed there. A
key that is not known is a problem too, since it would be a wish that is not obeyed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from executor_server.import_patterns import PATTERN_FORM, is_pattern

MAX_FILE_BYTES = 1 << 20

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
DAY_S = 86_400.0

_IMAGE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_FORM = "1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or a digit"

Model = TypeVar("Model", bound=BaseModel)


class ConfigError(Exception):
    """A file of settings can't be used. `problems` holds one sentence for each thing to mend."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class Section(BaseModel):
    """A table of settings: frozen, and without keys that nobody knows."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


# ---------------------------------------------------------------------------------------------------------------------
# Forms


def is_name(text: str) -> bool:
    """Whether a tenant, a profile or a token may be called this."""
    return _NAME.fullmatch(text) is not None


def _check_name(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"must be {NAME_FORM}")
    return text


def _check_pattern(text: str) -> str:
    if not is_pattern(text):
        raise ValueError(f"must be {PATTERN_FORM}")
    return text


def _check_image_name(text: str) -> str:
    if not _IMAGE_NAME.fullmatch(text):
        raise ValueError("must be 1 to 64 of a-z 0-9 . _ -, beginning with a letter or a digit")
    return text


def _check_absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("must be an absolute path")
    return path


Count = Annotated[int, Field(strict=True, gt=0, lt=2**63)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Bytes = Annotated[int, Field(strict=True, gt=0, lt=2**63)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=365 * DAY_S, allow_inf_nan=False)]
Name = Annotated[str, AfterValidator(_check_name)]
ImportPattern = Annotated[str, AfterValidator(_check_pattern)]
ImageName = Annotated[str, AfterValidator(_check_image_name)]
AbsolutePath = Annotated[Path, AfterValidator(_check_absolute)]


# ---------------------------------------------------------------------------------------------------------------------
# Files


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError, which calls the file a `kind`."""
    data = read_bytes(path, kind)
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"The {kind} {path} is not TOML: {error}."]) from error
    except RecursionError as error:
        raise ConfigError([f"The {kind} {path} is nested too deeply."]) from error


def read_bytes(path: Path, kind: str) -> bytes:
    """What is in a file of settings, which is small. Raises ConfigError."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError([f"The {kind} {path} is not a regular file."])
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError([f"The {kind} {path} can't be read: {error.strerror}."]) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError([f"The {kind} {path} is larger than {MAX_FILE_BYTES} bytes."])
    return data


def validated(model: type[Model], tables: Mapping[str, Any]) -> Model:
    """The settings in these tables. Raises ConfigError with every problem."""
    try:
        return model.model_validate(tables)
    except ValidationError as error:
        raise ConfigError([_sentence(model, problem) for problem in error.errors()]) from error


def _sentence(model: type[BaseModel], problem: ErrorDetails) -> str:
    """One problem of pydantic's as `key.path: what is allowed (it is VALUE)`."""
    location = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    if problem["type"] == "extra_forbidden":
        return f"{location}: no such key; there are {', '.join(_known_keys(model, problem['loc'][:-1]))}"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    where = f"{location}: " if location else ""
    if isinstance(problem["input"], (dict, BaseModel)):
        return f"{where}{message}"
    return f"{where}{message} (it is {_shown(problem['input'])})"


def _known_keys(model: type[BaseModel], location: Sequence[int | str]) -> Iterator[str]:
    found: Any = model
    for part in location:
        if isinstance(found, type) and issubclass(found, BaseModel):
            found = found.model_fields[str(part)].annotation
        else:  # an entry of a dict or a tuple of models: the part is its key
            found = next((each for each in _models_in(found)), found)
            continue
        models = list(_models_in(found))
        if len(models) == 1 and not _is_collection(found):
            found = models[0]
    if not (isinstance(found, type) and issubclass(found, BaseModel)):
        found = next(_models_in(found))
    yield from found.model_fields


def _is_collection(annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin is Annotated or origin in (Union, UnionType):
        return any(_is_collection(each) for each in get_args(annotation))
    return origin in (dict, tuple)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _models_in(each)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"
