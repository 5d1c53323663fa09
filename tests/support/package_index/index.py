"""The index itself: pages as PEP 503, 691 and 700 describe them, files, and the ways in which both can go wrong."""

from __future__ import annotations

import asyncio
import hashlib
import html
import io
import json
import zipfile
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

JSON_TYPE = "application/vnd.pypi.simple.v1+json"
LONG_AGO = "2020-01-02T03:04:05.000000Z"
_KEPT = {"Cache-Control": "max-age=365000000, immutable, public"}  # as the public index says of its files
_SLOW_STEP_S = 0.05
_SLOW_STEPS = 20


@dataclass
class Release:
    """One file of a project, and how it is offered."""

    filename: str
    content: bytes
    yanked: str = ""  # the reason
    requires_python: str = ""
    upload_time: str | None = LONG_AGO  # None: the index does not say
    sha256: str = ""  # empty: the true one
    size: int | None = None  # None: the true one
    metadata: bytes | None = None  # None: that of the wheel
    serves_metadata: bool = True  # by PEP 658
    behaviour: str = "whole"  # or hangs, short, slow, missing, stops

    @property
    def digest(self) -> str:
        return self.sha256 or hashlib.sha256(self.content).hexdigest()

    @property
    def core_metadata(self) -> bytes | None:
        if not self.serves_metadata or not self.filename.endswith(".whl"):
            return None
        return _metadata_in(self.content) if self.metadata is None else self.metadata


@dataclass
class PackageIndex:
    """An index. Its pages have one host, its files another, as those of the public index have."""

    host: str
    files_host: str
    projects: dict[str, list[Release]] = field(default_factory=dict)
    behaviour: str = "answers"  # or hangs, garbage, fails, endless; for the pages
    html_only: bool = False
    authorization: str = ""  # the header's value that every request for a page must have
    max_age_s: int = 600  # for which clients may keep a page
    requests: list[str] = field(default_factory=list)  # paths, in order, of pages and files

    @property
    def url(self) -> str:
        return f"https://{self.host}/simple/"

    def add(self, wheel: tuple[str, bytes], **offered: Any) -> Release:
        """Offers a file, as `make_wheel` returns it; further arguments are fields of the release."""
        release = Release(*wheel, **offered)
        project = release.filename.split("-")[0].replace("_", "-").replace(".", "-").lower()
        self.projects.setdefault(project, []).append(release)
        return release

    def forget_requests(self) -> None:
        self.requests.clear()

    # -- pages ---------------------------------------------------------------------------------------------------

    async def answer_page(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers a request for a page below /simple/."""
        self.requests.append(request.path)
        if self.authorization and request.headers.get("Authorization") != self.authorization:
            return web.Response(status=401, text="who are you?\n", headers={"WWW-Authenticate": "Basic"})
        if self.behaviour == "hangs":
            await asyncio.Event().wait()
        if self.behaviour == "fails":
            return web.Response(status=503, text="come back later\n")
        if self.behaviour == "garbage":
            return web.Response(body=bytes(range(256)) * 64, content_type=JSON_TYPE)
        if self.behaviour == "endless":
            return await _endless(request)
        project = request.path.removeprefix("/simple/").strip("/")
        if project and project not in self.projects:
            return web.Response(status=404, text="there is no such project\n")
        headers = {"Cache-Control": f"max-age={self.max_age_s}"}
        if JSON_TYPE in request.headers.get("Accept", "") and not self.html_only:
            return web.Response(text=json.dumps(self._json(project)), content_type=JSON_TYPE, headers=headers)
        return web.Response(text=self._html(project), content_type="text/html", headers=headers)

    def _json(self, project: str) -> dict[str, Any]:
        meta = {"api-version": "1.1"}
        if not project:
            return {"meta": meta, "projects": [{"name": name} for name in self.projects]}
        releases = self.projects[project]
        versions = sorted({release.filename.split("-")[1].removesuffix(".tar.gz") for release in releases})
        return {
            "meta": meta,
            "name": project,
            "versions": versions,
            "files": [self._file(project, r) for r in releases],
        }

    def _file(self, project: str, release: Release) -> dict[str, Any]:
        described: dict[str, Any] = {
            "filename": release.filename,
            "url": self._url_of(project, release),
            "hashes": {"sha256": release.digest},
            "yanked": release.yanked or False,
            "size": len(release.content) if release.size is None else release.size,
        }
        if release.requires_python:
            described["requires-python"] = release.requires_python
        if release.upload_time is not None:
            described["upload-time"] = release.upload_time
        if (metadata := release.core_metadata) is not None:
            described["core-metadata"] = {"sha256": hashlib.sha256(metadata).hexdigest()}
        return described

    def _html(self, project: str) -> str:
        if not project:
            links = [f'<a href="/simple/{name}/">{name}</a>' for name in self.projects]
        else:
            links = [self._link(project, release) for release in self.projects[project]]
        return f"<!DOCTYPE html><body>{'<br>'.join(links)}</body>"

    def _link(self, project: str, release: Release) -> str:
        attributes = {"href": f"{self._url_of(project, release)}#sha256={release.digest}"}
        if release.yanked:
            attributes["data-yanked"] = release.yanked
        if release.requires_python:
            attributes["data-requires-python"] = release.requires_python
        if (metadata := release.core_metadata) is not None:
            attributes["data-core-metadata"] = f"sha256={hashlib.sha256(metadata).hexdigest()}"
        written = " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes.items())
        return f"<a {written}>{html.escape(release.filename)}</a>"

    def _url_of(self, project: str, release: Release) -> str:
        return f"https://{self.files_host}/packages/{project}/{release.filename}"

    # -- files ---------------------------------------------------------------------------------------------------

    async def answer_file(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers a request for a file below /packages/."""
        self.requests.append(request.path)
        project, _, name = request.path.removeprefix("/packages/").partition("/")
        for release in self.projects.get(project, ()):
            if name == release.filename:
                return await _served(request, release)
            if name == f"{release.filename}.metadata" and (metadata := release.core_metadata) is not None:
                return web.Response(body=metadata, content_type="application/octet-stream", headers=_KEPT)
        return web.Response(status=404, text="there is no such file\n")


async def _served(request: web.BaseRequest, release: Release) -> web.StreamResponse:
    content = release.content
    if release.behaviour == "missing":
        return web.Response(status=404, text="it was here\n")
    if release.behaviour == "hangs":
        await asyncio.Event().wait()
    if release.behaviour == "whole":
        return web.Response(body=content, content_type="application/octet-stream", headers=_KEPT)
    response = web.StreamResponse()
    response.content_length = len(content)
    await response.prepare(request)
    if release.behaviour == "slow":
        step = len(content) // _SLOW_STEPS + 1
        for start in range(0, len(content), step):
            await response.write(content[start : start + step])
            await asyncio.sleep(_SLOW_STEP_S)
        return response
    await response.write(content[: len(content) // 2])
    if release.behaviour == "stops":  # half of it, and then nothing
        await asyncio.Event().wait()
    assert release.behaviour == "short", release.behaviour
    if request.transport is not None:
        request.transport.close()
    return response


async def _endless(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": JSON_TYPE})
    try:
        await response.prepare(request)
        await response.write(b'{"meta": {"api-version": "1.1"}, "name": "x", "files": [')
        # A write to a TLS connection that the client has left raises nothing and does not suspend: without the pause
        # the loop would never learn that the connection is lost.
        while request.transport is not None:
            await response.write(b" " * 65_536)
            await asyncio.sleep(0)
    except ConnectionError:
        pass
    return response


def _metadata_in(wheel: bytes) -> bytes | None:
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            for name in archive.namelist():
                if name.endswith(".dist-info/METADATA"):
                    return archive.read(name)
    except (zipfile.BadZipFile, RuntimeError):
        pass
    return None
