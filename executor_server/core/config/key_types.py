"""Tables of settings, without unknown keys, and the forms of their values: for the configuration, policy and tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from executor_api.sizes import bytes_of
from executor_server.core import PATTERN_FORM, AddressError, TcpAddress, addresses, is_pattern

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
DAY_S = 86_400.0

_IMAGE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_FORM = "1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or a digit"
IMAGE_NAME_FORM = "1 to 64 of a-z 0-9 . _ -, beginning with a letter or a digit"


class ConfigError(Exception):
    """A file of settings can't be used. `problems` holds one sentence for each thing to mend."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class Section(BaseModel):
    """A table of settings: frozen, and without unknown keys, which would be settings without effect."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def is_name(text: str) -> bool:
    """True for a name that a tenant, a profile or a token may have."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True)
class Form:
    """A validator that can say what it requires, in its error and in the generated documentation."""

    text: str
    is_right: Callable[[Any], bool]

    def __call__(self, value: Any) -> Any:
        if not self.is_right(value):
            raise ValueError(f"must be {self.text}")
        return value


@dataclass(frozen=True)
class ReadForm:
    """A validator that returns what it has read. `read` raises ValueError with a clause: "has no port"."""

    text: str
    read: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        try:
            return self.read(value)
        except ValueError as error:
            raise ValueError(f"{error}; it must be {self.text}") from error


UNSHOWN = Field(repr=False)
"""Marks a field whose value no message may repeat: a secret may stand there by mistake."""

BackendName = Literal["local", "docker", "e2b"]


def each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    """Validates a list whose order means something: no name may be in it twice. Raises ValueError."""
    twice = [name for index, name in enumerate(names) if name in names[:index]]
    if twice:
        raise ValueError(f"lists {twice[0]!r} twice")
    return names


def _size(value: object) -> object:
    return bytes_of(value) if isinstance(value, str) else value


def _is_tcp(text: str) -> bool:
    try:
        return isinstance(addresses.parse(text), TcpAddress)
    except AddressError:
        return False


Count = Annotated[int, Field(strict=True, gt=0, lt=2**63)]
WrittenSize = BeforeValidator(_size)
"""Lets a number of bytes be written as "8GB" or "512MiB"."""
Bytes = Annotated[int, WrittenSize, Field(strict=True, gt=0, lt=2**63)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=365 * DAY_S, allow_inf_nan=False)]
Name = Annotated[str, AfterValidator(Form(NAME_FORM, is_name))]
ImportPattern = Annotated[str, AfterValidator(Form(PATTERN_FORM, is_pattern))]
ImageName = Annotated[str, AfterValidator(Form(IMAGE_NAME_FORM, lambda text: _IMAGE_NAME.fullmatch(text) is not None))]
HostPort = Annotated[str, AfterValidator(Form("HOST:PORT", _is_tcp))]


def _from_file(path: Path, info: ValidationInfo) -> Path:
    found = Path(info.context or "", os.path.expanduser(path))  # noqa: PTH111 (leaves the name of no user as it is)
    if not found.is_absolute():
        raise ValueError("must be an absolute path outside a configuration file")
    return found


AbsolutePath = Annotated[
    Path, AfterValidator(Form("a path", lambda path: "\0" not in str(path))), AfterValidator(_from_file)
]
