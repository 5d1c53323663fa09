"""`POST /v1/run`: one session, one execution, its result as JSON. The session ends whatever happens."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import suppress
from typing import Any

import PIL.Image
from connectrpc.errors import ConnectError
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from executor_client._core.short_repr import png_of
from executor_client._core.value_text import text_chars, value_text
from executor_client.aio import AsyncExecutorClient
from executor_client.aio_session import AsyncSession
from executor_client.errors import ExecutorClientError
from executor_client.results import ErrorDetail, ExecutionResult, Usage
from executor_server.gateway import errors
from executor_server.gateway.bodies import json_of
from executor_server.gateway.clients import Clients
from executor_server.gateway.connect.service import bearer_token

PATH = "/v1/run"
BODY_BYTES_MAX = 2 << 20
OUTPUT_CHARS_MAX = 1 << 20
OUTPUT_TEXT_CHARS_MAX = 50_000
IMAGES_BYTES_MAX = 16 << 20
FILES_BYTES_MAX = 8 << 20


class RunRequest(BaseModel):
    """What to run, and in which session."""

    model_config = ConfigDict(extra="forbid", strict=True)

    code: str = Field(description="Python, at most 1 MiB of UTF-8.")
    image: str | None = Field(None, description="An image of the policy. Default: the policy's.")
    authorized_imports: list[str] = Field([], description='Modules besides the default ones: "numpy", "os.path".')
    packages: list[str] = Field([], description='Packages besides those of the image: "pandas>=2".')
    network: list[str] = Field([], description='Hosts besides the default ones: "pypi.org", "*.example.com:443".')
    env: dict[str, str] = Field({}, description="Environment variables.")
    limits: dict[str, int | float] = Field(
        {}, description='Limits of the session: {"wall_time_s": 10, "memory_bytes": 536870912}.'
    )


class RunImage(BaseModel):
    mime_type: str
    data: str | None = Field(description=f"Base64. null behind the first {IMAGES_BYTES_MAX >> 20} MiB of images.")


class RunFile(BaseModel):
    path: str = Field(description="Relative to the workspace.")
    size_bytes: int
    data: str | None = Field(description=f"Base64. null behind the first {FILES_BYTES_MAX >> 20} MiB of files.")


class RunResult(BaseModel):
    """The end of an execution. A program that fails is a result, too: look at `outcome`."""

    outcome: str = Field(description='"succeeded", "exception", "timeout", "out_of_memory" …')
    output: Any = Field(description="The value of the trailing expression, if JSON can hold it; else null.")
    output_text: str | None = Field(
        description="The same value as Python's repr writes it, cut; null if there is none."
    )
    logs: str = Field(description="Everything printed, in order.")
    stdout: str
    stderr: str
    omitted_output_bytes: int
    images: list[RunImage] = Field(
        description="Figures and images that the program displayed, and its value if that is an image."
    )
    displays: list[dict[str, str]] = Field(description="Other displayed objects: their texts by MIME type, untrusted.")
    files: list[RunFile] = Field(description="Files of the workspace that the program made or changed.")
    files_truncated: bool = Field(description="There are more than are listed.")
    error: ErrorDetail | None = Field(description="The program's own error.")
    usage: Usage


class Run:
    """The endpoint."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    async def answer(self, request: Request) -> Response:
        try:
            client = await self._clients.of(bearer_token(request.headers))
            return _json_response(await _run(client, await json_of(request, RunRequest, BODY_BYTES_MAX, too_large=429)))
        except asyncio.CancelledError:
            return errors.response(errors.of_cancellation())
        except ConnectError as error:
            return errors.response(error)
        except ExecutorClientError as error:
            return errors.response(errors.of_client(error))
        except Exception as error:  # noqa: BLE001 - the border
            return errors.response(errors.of_bug(PATH, error))


async def _run(client: AsyncExecutorClient, wanted: RunRequest) -> RunResult:
    session = await client.create_session(
        wanted.image,
        wanted.authorized_imports,
        wanted.limits or None,
        packages=wanted.packages,
        network=wanted.network,
        env=wanted.env,
    )
    async with session:
        return await _result(session, await session.execute(wanted.code))


async def _result(session: AsyncSession, result: ExecutionResult) -> RunResult:
    return RunResult(
        outcome=result.outcome.value,
        output=_plain(result.output),
        output_text=None if result.output is None else value_text(result.output, OUTPUT_TEXT_CHARS_MAX),
        logs=result.logs,
        stdout=result.stdout,
        stderr=result.stderr,
        omitted_output_bytes=result.omitted_output_bytes,
        images=await _images(result),
        displays=[dict(each.data) for each in result.displays],
        files=await _files(session, result),
        files_truncated=result.artifacts_truncated,
        error=result.error,
        usage=result.usage,
    )


async def _images(result: ExecutionResult) -> list[RunImage]:
    shown = [(each.mime_type, each.data) for each in result.image_entries]
    if isinstance(result.output, PIL.Image.Image):
        shown.append(("image/png", await asyncio.to_thread(png_of, result.output)))
    left, images = IMAGES_BYTES_MAX, []
    for mime_type, data in shown:
        left -= len(data)
        images.append(RunImage(mime_type=mime_type, data=_base64(data) if left >= 0 else None))
    return images


async def _files(session: AsyncSession, result: ExecutionResult) -> list[RunFile]:
    left, files = FILES_BYTES_MAX, []
    for each in result.artifacts:
        data: bytes | None = None
        if each.size_bytes <= left:
            # A process of the program may have changed it since, and the sandbox may be lost.
            with suppress(ExecutorClientError):
                data = await session.files.read(each.path, max_bytes=left)
        left -= len(data or b"")
        files.append(RunFile(path=each.path, size_bytes=each.size_bytes, data=None if data is None else _base64(data)))
    return files


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _plain(value: object) -> object:
    """Returns a value as JSON; None if JSON can't hold it, or it is too large."""
    if text_chars(value) > OUTPUT_CHARS_MAX:
        return None
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None


def _json_response(result: RunResult) -> Response:
    # ASCII only: a text of a program may have half of a surrogate pair, which UTF-8 can't encode.
    return Response(json.dumps(result.model_dump(), allow_nan=False), media_type="application/json")
