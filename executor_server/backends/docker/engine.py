"""Requests to the Engine that do not block the event loop: the only file that knows the `docker` SDK.

The SDK blocks, so each request runs on a thread of our own, with a limit on their number and a time limit on each:
an Engine that hangs costs its requests and nothing else, and one that recovers needs no new connection. Every error
becomes an EngineFailure, which has the status of the Engine's answer if there was one.

A request can't be revoked. If a caller is cancelled during a change, it still waits for the end of the request, so that
it knows what to clean up. A query is not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import docker
import docker.errors
import requests

from executor_server.backends.docker.host import NoEngine, check_answers
from executor_server.backends.docker.options import HostAbilities
from executor_server.core import BackendSilent, SandboxFailure

OLDEST_API = (1, 41)

_NOT_FOUND = 404
_CONFLICT = 409
_EXPLANATION_CHARS = 500
_REMOVAL_TIMEOUT_S = 10.0
_REMOVAL_POLL_S = 0.05

# Errors of reading an answer that does not have the form of an Engine's.
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError)
# Errors of a request that got no answer.
_NO_ANSWER = (requests.Timeout, requests.ConnectionError, ConnectionError, TimeoutError)

_T = TypeVar("_T")
_Client = Any
"""docker.APIClient. Its type annotations promise little, so each field of an answer is converted."""


class EngineFailure(SandboxFailure):
    """The Engine refused, or did not answer. `status` is the HTTP status of its answer, None when there was none."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EngineSilent(EngineFailure, BackendSilent):
    """No answer came from the Engine, or no connection to it: the content of the request was not the reason."""


@dataclass(frozen=True)
class EngineFacts:
    """The Engine's information about itself and its host."""

    version: str
    architecture: str  # as images name it: amd64, arm64
    abilities: HostAbilities
    kernel: str  # its release
    cgroup_version: str
    swap_limit: bool
    pids_limit: bool
    runtimes: tuple[str, ...]
    default_runtime: str
    runc_version: str | None
    storage_driver: str
    filters_system_calls: bool
    few_ids: bool  # its containers live in a user namespace (userns-remap, rootless), which has some 65,536 users


@dataclass(frozen=True)
class EngineImage:
    image_id: str
    architecture: str
    system: str
    volumes: tuple[str, ...]


@dataclass(frozen=True)
class ContainerState:
    running: bool
    exit_code: int
    out_of_memory: bool
    pid: int  # the first process as the Engine's host numbers it; 0 when the container does not run


@dataclass(frozen=True)
class ListedContainer:
    container_id: str
    running: bool
    labels: Mapping[str, str]


class Engine:
    """One Engine, behind its Unix socket."""

    def __init__(self, socket: Path, *, timeout_s: float, concurrency: int) -> None:
        self._socket = socket
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="engine")
        self._client: _Client = None
        self._requests: set[asyncio.Task[Any]] = set()

    async def connect(self) -> EngineFacts:
        """Agrees on a version of its interface and asks for its facts. Raises EngineFailure."""
        self._client = await self._change("connect", self._connected_client)
        return await self._ask("what it is", lambda client: _facts(client.version(), client.info()))

    async def close(self) -> None:
        """Waits for the requests that are under way, each bounded in time, and closes the connections."""
        await asyncio.gather(*self._requests, return_exceptions=True)
        if self._client is not None:
            self._client.close()
        self._threads.shutdown(wait=False)

    @property
    def api_version(self) -> tuple[int, ...]:
        return _numbers(self._connected().api_version)

    def pull(self, reference: str) -> Iterator[Mapping[str, Any]]:
        """Fetches an image, and yields the Engine's lines about it. Blocks: call it on a thread of your own.

        Raises EngineFailure. Closing the iterator abandons the fetch.
        """
        client = self._translated("connect", self._connected_client)
        with contextlib.closing(client):
            lines = self._translated(f"fetch {reference}", lambda: client.pull(reference, stream=True, decode=True))
            while (line := self._translated(f"fetch {reference}", lambda: next(lines, None))) is not None:
                if "error" in line:
                    raise EngineFailure(
                        f"the Engine can't fetch {reference}: {str(line['error'])[:_EXPLANATION_CHARS]}"
                    )
                yield line

    # -- questions -----------------------------------------------------------------------------------------------

    async def image(self, reference: str) -> EngineImage | None:
        """Returns the image of that name or id; None when the Engine has none."""
        return await self._ask_for(f"image {reference}", lambda client: _image(client.inspect_image(reference)))

    async def state(self, container: str) -> ContainerState | None:
        """Returns the state of a container; None when there is no such container."""
        return await self._ask_for(
            f"container {container}", lambda client: _state(client.inspect_container(container)["State"])
        )

    async def containers(self, label: str) -> list[ListedContainer]:
        """Returns all containers that carry the label, NAME=VALUE, whether they run or not."""
        return await self._ask(
            "its containers",
            lambda client: [_listed(one) for one in client.containers(all=True, filters={"label": [label]})],
        )

    async def log(self, container: str) -> bytes:
        """Returns its standard error; the size of its log is limited."""
        log: bytes = await self._ask(f"the log of {container}", lambda client: client.logs(container, stdout=False))
        return log

    # -- changes -------------------------------------------------------------------------------------------------

    async def create(self, config: Mapping[str, Any], name: str) -> str:
        """Makes a container and returns its id."""
        return await self._change(
            f"make {name}", lambda: str(self._connected().create_container_from_config(config, name)["Id"])
        )

    async def start(self, container: str) -> None:
        await self._change(f"start {container}", lambda: self._connected().start(container))

    async def rename(self, container: str, name: str) -> None:
        await self._change(f"rename {container}", lambda: self._connected().rename(container, name))

    async def remove(self, container: str) -> None:
        """Kills and removes it with its volumes; returns when it does not exist any more, or never did."""
        try:
            await self._change(
                f"remove {container}", lambda: self._connected().remove_container(container, v=True, force=True)
            )
        except EngineFailure as failure:
            if failure.status == _NOT_FOUND:
                return
            if failure.status != _CONFLICT:
                raise
            await self._wait_for_removal(container)  # another process removes it at this moment

    async def _wait_for_removal(self, container: str) -> None:
        deadline = asyncio.get_running_loop().time() + _REMOVAL_TIMEOUT_S
        while await self.state(container) is not None:
            if asyncio.get_running_loop().time() > deadline:
                raise EngineFailure(f"container {container} is being removed, and still there", _CONFLICT)
            await asyncio.sleep(_REMOVAL_POLL_S)

    # -- one request ---------------------------------------------------------------------------------------------

    async def _ask_for(self, what: str, ask: Callable[[_Client], _T]) -> _T | None:
        try:
            return await self._ask(what, ask)
        except EngineFailure as failure:
            if failure.status == _NOT_FOUND:
                return None
            raise

    async def _ask(self, what: str, ask: Callable[[_Client], _T]) -> _T:
        return await asyncio.shield(self._begin(what, lambda: ask(self._connected())))

    async def _change(self, what: str, change: Callable[[], _T]) -> _T:
        request = self._begin(what, change)
        cancelled: asyncio.CancelledError | None = None
        while not request.done():
            try:
                await asyncio.shield(request)
            except asyncio.CancelledError as error:
                cancelled = error
            except EngineFailure:
                break
        if cancelled is not None:
            raise cancelled
        return request.result()

    def _begin(self, what: str, request: Callable[[], _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(self._run(what, request), name=f"engine: {what}")
        self._requests.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._requests.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved here, since the caller may have been cancelled

    async def _run(self, what: str, request: Callable[[], _T]) -> _T:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._slots.acquire()
        except TimeoutError as error:
            raise EngineSilent(f"the Engine is busy with {self._concurrency} other requests ({what})") from error
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._translated, what, request)
        finally:
            self._slots.release()

    def _translated(self, what: str, request: Callable[[], _T]) -> _T:
        """Runs on a thread; turns errors of the SDK and the libraries below it into EngineFailure."""
        try:
            check_answers(self._socket)  # the SDK leaks a socket that it can't connect
            return request()
        except NoEngine as problem:
            raise EngineSilent(f"the Engine does not answer ({what}): {problem.detail}") from problem
        except docker.errors.APIError as error:
            explanation = str(error.explanation or error)[:_EXPLANATION_CHARS]
            status = error.response.status_code if error.response is not None else None
            raise EngineFailure(f"the Engine refuses to {what}: {explanation}", status) from error
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            kind = EngineSilent if isinstance(_cause(error), _NO_ANSWER) else EngineFailure
            raise kind(f"the Engine does not answer ({what}): {self._in_words(error)}") from error
        except _UNREADABLE as error:
            raise EngineFailure(f"the Engine does not answer like one ({what}): {error!r}") from error

    def _in_words(self, error: Exception) -> str:
        cause = _cause(error)
        if isinstance(cause, requests.Timeout):
            return f"nothing came within {self._timeout_s:g} s"
        if isinstance(cause, (requests.JSONDecodeError, *_UNREADABLE)):
            return "what came is not an Engine's answer"
        if isinstance(cause, requests.ConnectionError):
            return "what listens there hangs up, or is no Engine"
        return str(error)

    def _connected(self) -> _Client:
        if self._client is None:
            raise EngineFailure("the Engine has not been connected to")
        return self._client

    def _connected_client(self) -> _Client:
        client: _Client = cast(Any, docker.APIClient)(
            base_url=f"unix://{self._socket}",
            version="auto",
            timeout=self._timeout_s,
            max_pool_size=self._concurrency,
        )
        client.trust_env = False  # the proxies and passwords of the environment are not for the Engine
        return client


def _cause(error: Exception) -> BaseException:
    """Returns the error that the SDK has wrapped into an exception of its own."""
    return error.__cause__ if isinstance(error, docker.errors.DockerException) and error.__cause__ else error


def _facts(version: Mapping[str, Any], info: Mapping[str, Any]) -> EngineFacts:
    options = [str(option) for option in info.get("SecurityOptions") or ()]
    components = {component["Name"]: component["Version"] for component in version.get("Components") or ()}
    cgroup_version = str(info.get("CgroupVersion", "1"))
    return EngineFacts(
        version=str(version["Version"]),
        architecture=str(version["Arch"]),
        abilities=HostAbilities(
            machine=str(info["Architecture"]),
            processors=int(info["NCPU"]),
            limits_memory=bool(info.get("MemoryLimit")),
            limits_processors=bool(info.get("CpuCfsQuota")),
            has_swappiness=cgroup_version == "1" and bool(info.get("MemoryLimit")),
            limits_sockets=cgroup_version == "1" and bool(info.get("KernelMemoryTCP")),
            runtime=str(info.get("DefaultRuntime", "runc")),
        ),
        kernel=str(info.get("KernelVersion", "")),
        cgroup_version=cgroup_version,
        swap_limit=bool(info.get("SwapLimit")),
        pids_limit=bool(info.get("PidsLimit")),
        runtimes=tuple(info.get("Runtimes") or ()),
        default_runtime=str(info.get("DefaultRuntime", "")),
        runc_version=components.get("runc"),
        storage_driver=str(info.get("Driver", "")),
        filters_system_calls=any(option.startswith("name=seccomp") for option in options),
        few_ids=any(option.startswith(("name=rootless", "name=userns")) for option in options),
    )


def _image(found: Mapping[str, Any]) -> EngineImage:
    return EngineImage(
        image_id=str(found["Id"]),
        architecture=str(found.get("Architecture", "")),
        system=str(found.get("Os", "")),
        volumes=tuple((found.get("Config") or {}).get("Volumes") or ()),
    )


def _state(found: Mapping[str, Any]) -> ContainerState:
    return ContainerState(
        running=bool(found["Running"]),
        exit_code=int(found["ExitCode"]),
        out_of_memory=bool(found["OOMKilled"]),
        pid=int(found["Pid"]),
    )


def _listed(found: Mapping[str, Any]) -> ListedContainer:
    return ListedContainer(str(found["Id"]), found["State"] == "running", dict(found["Labels"] or {}))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
