"""The configuration of each backend: its images by name, and how it is reached."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from executor_server.core.config.key_types import DAY_S, AbsolutePath, Count, Form, ImageName, Seconds, Section

# github.com/distribution/reference: [HOST[:PORT]/]PATH[:TAG][@DIGEST]. It admits no space, no quote, no leading dash.
_IMAGE_REFERENCE = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?/)?"
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
_MAX_REFERENCE_CHARS = 255
_MODULE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")
_ENGINE_HOST = re.compile(r"(?:unix:///|tcp://|ssh://|https?://)\S{1,255}")


_REFERENCE_FORM = Form(
    "an image reference like name, host/path/name:tag or name@sha256:DIGEST",
    lambda text: len(text) <= _MAX_REFERENCE_CHARS and _IMAGE_REFERENCE.fullmatch(text) is not None,
)
_MODULE_FORM = Form("the dotted name of a module", lambda text: _MODULE_NAME.fullmatch(text) is not None)
_ENGINE_FORM = Form(
    "unix:///PATH, tcp://HOST:PORT or ssh://HOST", lambda text: _ENGINE_HOST.fullmatch(text) is not None
)

ImageReference = Annotated[str, AfterValidator(_REFERENCE_FORM)]
ModuleName = Annotated[str, AfterValidator(_MODULE_FORM)]
HttpUrl = Annotated[str, Field(pattern=r"^https?://[^\s/…]{1,255}/?$")]
EngineHost = Annotated[str, AfterValidator(_ENGINE_FORM)]
Preload = Annotated[tuple[ModuleName, ...], Field(max_length=64)]


def _by(key: str) -> BeforeValidator:
    """Lets an image be written as the value of this key alone."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, (str, Path)) else value)


class LocalImage(Section):
    """A Python environment of this host."""

    python: AbsolutePath
    """The folder of the environment, or its interpreter."""
    preload: Preload = ()
    """Modules to import ahead in every sandbox, so that importing them later costs nothing."""


class DockerImage(Section):
    """An image of the Engine."""

    reference: ImageReference
    """The reference of the image, as in `docker run`."""
    preload: Preload = ()
    """Modules to import ahead in every sandbox."""


class LocalSection(Section):
    """The local backend."""

    images: Annotated[dict[ImageName, Annotated[LocalImage, _by("python")]], Field(min_length=1)] = Field(
        default_factory=lambda: {"base": LocalImage(python=Path(sys.executable))}
    )
    """Image names for clients, each with a Python environment of this host. The first is the default."""
    bwrap: AbsolutePath | None = None
    """The bubblewrap to use. Not set: the system's, else the one that comes with the package."""


class DockerSection(Section):
    """The Docker backend."""

    images: Annotated[dict[ImageName, Annotated[DockerImage, _by("reference")]], Field(min_length=1)] = Field(
        default_factory=lambda: {
            name: DockerImage(reference=f"remote-executor/{name}") for name in ("base", "data", "browser")
        }
    )
    """Image names for clients, each with an image of the Engine. The first is the default."""
    host: EngineHost | None = None
    """The Engine's address. Not set: `$DOCKER_HOST`, else the Engine of this host."""
    runtime: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    """One of the Engine's runtimes, such as runsc or crun. Not set: its default."""


class E2BImage(Section):
    """A template of the E2B account."""

    template: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]
    """The id or name of the template."""
    preload: Preload = ()
    """Modules to import ahead in every sandbox."""


class E2BSection(Section):
    """The E2B backend."""

    images: Annotated[dict[ImageName, Annotated[E2BImage, _by("template")]], Field(min_length=1)] = Field(
        default_factory=lambda: {"base": E2BImage(template="code-interpreter-v1")}
    )
    """Image names for clients, each with a template of the account. The first is the default."""
    api_key_file: AbsolutePath | None = None
    """A private file with the API key. Not set: `$E2B_API_KEY`."""
    api_url: HttpUrl | None = None
    """The address of E2B's API. Not set: from the SDK's environment variables, else E2B's cloud."""
    sandbox_url: HttpUrl | None = None
    """The address of the sandboxes. Not set: from the SDK's environment variables, else E2B's cloud."""
    lifetime_s: Annotated[float, Field(strict=True, ge=60, le=DAY_S)] = 600.0
    """Seconds that a sandbox outlives its daemon; a running daemon renews them."""
    max_sandboxes: Count = 20
    """Sandboxes of the account at a time."""
    pause_idle_s: Seconds | None = None
    """Seconds without use until a sandbox is paused; using it resumes it. Not set: never."""
    reconnect_s: Seconds = 120.0
    """Seconds that the connection to a sandbox may be broken until its session is lost."""
