"""Puts a person's uploads for a run into the workspace, where the agent's code can open them.

smolagents' `GradioUI(agent, file_upload_folder=...)` copies uploads into a local folder, names the paths in the task,
and passes all of them to `run` as `images` (smolagents 1.24 and later). Here the files go into the workspace, the task
gets their paths there, and the model sees the images among them.

Only `images` is read, because it comes from the caller. A path in the text of a task may come from anyone who can chat
with the agent, and could name any file of the web server.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePath
from typing import Any

import PIL.Image

from executor_client import ExecutorClientError, InvalidRequest
from executor_client._core.images import check_image
from executor_client.smolagents.executor import RemoteExecutor
from executor_client.smolagents.files import workspace_path

FOLDER = "uploads"
"""The workspace folder for files whose path can't be used there."""
SHOWN_BYTES_MAX = 32 << 20
"""Limit of an image shown to the model; larger images are only files for the code."""

_MIME_TYPES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


def with_uploads(agent: Any, task: str, images: Any) -> tuple[str, Any]:
    """Puts images that are paths into the workspace. Returns the task and the images of the run.

    Raises InvalidRequest for a path that is not a file, or that the policy refuses.
    """
    executor = getattr(agent, "python_executor", None)
    if not images or not isinstance(executor, RemoteExecutor):
        return task, images
    shown = []
    for image in images:
        if not isinstance(image, (str, os.PathLike)):
            shown.append(image)
            continue
        path = os.fspath(image)
        there = workspace_path(PurePath(path)) if not PurePath(path).is_absolute() else None
        there = there or f"{FOLDER}/{PurePath(path).name}"
        _put(executor, path, there)
        task = task.replace(repr(path), repr(there))
        if (picture := _picture(Path(path))) is not None:
            shown.append(picture)
    return task, shown or None


def _put(executor: RemoteExecutor, path: str, there: str) -> None:
    try:
        executor.files.put(path, there)
    except ExecutorClientError as error:  # before OSError: a FileError is both
        error.add_note(f"while copying the file {path!r} into the workspace of the session")
        raise
    except OSError as error:
        raise InvalidRequest(f"the file {path!r} can't be read: {error.strerror}") from error


def _picture(path: Path) -> PIL.Image.Image | None:
    """Returns the file as an image for the model; None for other files and unsafe images."""
    with path.open("rb") as file:
        data = file.read(SHOWN_BYTES_MAX + 1)
    mime_type = next((mime_type for start, mime_type in _MIME_TYPES.items() if data.startswith(start)), None)
    if mime_type is None or len(data) > SHOWN_BYTES_MAX:
        return None
    return check_image(data, mime_type, "upload").pil
