"""The double itself: it answers as the cloud does, with machines of this host, what our backend asks and no more.

One listening socket serves both the account (REST) and the envd of each sandbox. The SDK's headers tell them apart.
See the SDK for the settings; `Double.environment` has them.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
import re
import secrets
import shutil
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from aiohttp import web

from tests.support.e2b import envd
from tests.support.e2b.answers import ApiError, Cut, Outgoing, connect_error, strike
from tests.support.e2b.faults import Fault, Kind, Request, Rule, Storm
from tests.support.e2b.machine import Machine, MachineError, MachineMissing
from tests.support.e2b.wall import Wall

ENVD_PORT = "49983"
ENVD_VERSION = "0.6.7"
DEFAULT_LIFETIME_S = 300
LIFETIME_MAX_S = 24 * 3600
LOG_ENTRIES_MAX = 100_000
PAGE_MAX = 100
T = TypeVar("T")
IDEMPOTENCY_KEY = re.compile(r"[a-z0-9-]{1,255}")


@dataclass(frozen=True)
class Template:
    template_id: str
    has_python: bool = True
    python: Path = Path(sys.executable)


TEMPLATES = (
    Template("code-interpreter-v1"),
    Template("base"),
    Template("no-python", has_python=False),
)


@dataclass
class DoubleSandbox:
    """One sandbox as the cloud knows it."""

    sandbox_id: str
    template: Template
    asked: dict[str, Any]  # the body of the request that made it
    access_token: str | None
    started_at: float
    end_at: float
    machine: Machine
    state: str = "running"
    timer: asyncio.TimerHandle | None = None
    connections: set[asyncio.Transport] = field(default_factory=set)  # connections with a request under way

    @property
    def metadata(self) -> dict[str, str]:
        return self.asked.get("metadata") or {}

    @property
    def wall(self) -> Wall:
        return self.machine.wall


class Double:
    """Serves from `async with` on, in the event loop of its caller.

    `max_sandboxes` may run at one time; `port` 0 is any that is free. `outside`: addresses by their names; machines then
    know these names, and reach those that they are to let out. Without it they have no network at all.
    """

    def __init__(
        self,
        *,
        api_key: str = "e2b_" + "0" * 40,
        max_sandboxes: int = 20,
        templates: tuple[Template, ...] = TEMPLATES,
        port: int = 0,
        secure: bool = True,
        outside: Mapping[str, str] | None = None,
    ) -> None:
        self.api_key = api_key
        self.max_sandboxes = max_sandboxes
        self.templates = {template.template_id: template for template in templates}
        self.sandboxes: dict[str, DoubleSandbox] = {}
        self.requests: list[Request] = []
        self.created = 0
        self._port = port
        self._secure = secure
        self._outside = outside
        self._rules: list[Rule] = []
        self._is_down = False
        self._clock_offset_s = 0.0
        self._creating = 0
        self._keyed: dict[str, asyncio.Task[DoubleSandbox]] = {}
        # Tasks that run to their end, even when the client has closed its connection.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._runner: web.ServerRunner | None = None
        self._server: web.Server | None = None
        self._directory: Path | None = None

    # Life

    async def __aenter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="double-"))
        self._server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(self._server, handle_signals=False, shutdown_timeout=0.0)
        try:
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
            await site.start()
            self._port = self._runner.addresses[0][1]
            (key_file := self.api_key_file).touch(mode=0o600)
            key_file.write_text(self.api_key + "\n")
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every sandbox, every connection and the server. Idempotent."""
        if self._runner is not None:
            self.cut_all()
            await self._runner.cleanup()
            self._runner = None
        while self._tasks or self.sandboxes:
            for sandbox in list(self.sandboxes.values()):
                await self._end(sandbox)
            if self._tasks:  # a sandbox that is made meanwhile is ended in the next round
                await asyncio.wait(self._tasks)
        if self._directory is not None:
            shutil.rmtree(self._directory)
            self._directory = None

    # For tests and people

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def api_key_file(self) -> Path:
        assert self._directory is not None
        return self._directory / "api-key"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make the SDK talk to this double."""
        return {"E2B_API_KEY": self.api_key, "E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url}

    def fault(self, kind: Kind, path: str = "*", **settings: Any) -> Fault:
        """Adds a rule, which is tried after those before it. See `Fault`."""
        rule = Fault(kind, path, **settings)
        self._rules.append(rule)
        return rule

    def storm(self, seed: int, *, rate: float, **settings: Any) -> Storm:
        """Adds many rules at once, by chance from a seed. See `Storm`."""
        storm = Storm(seed, rate=rate, **settings)
        self._rules.append(storm)
        return storm

    def clear_faults(self) -> None:
        """Removes all rules; the effects of their faults stay."""
        self._rules.clear()

    def now(self) -> float:
        """Seconds since the epoch, by the double's own clock."""
        return time.time() + self._clock_offset_s

    def advance(self, seconds: float) -> None:
        """Moves the double's clock forward or back. Sandboxes whose end is due end before the loop goes on."""
        self._clock_offset_s += seconds
        for sandbox in self.sandboxes.values():
            self._set_timer(sandbox)

    def go_down(self) -> None:
        """Cuts every connection now, and each new request, until `come_up`."""
        self._is_down = True
        self.cut_all()

    def go_down_for(self, seconds: float) -> None:
        self.go_down()
        asyncio.get_running_loop().call_later(seconds, self.come_up)

    def come_up(self) -> None:
        self._is_down = False

    def cut_all(self) -> None:
        """Cuts every connection, once."""
        assert self._server is not None
        for connection in self._server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def vanish(self, sandbox_id: str) -> None:
        """Ends the sandbox at once, without a message to any client."""
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is not None:
            await self._end(sandbox)

    # Sandboxes

    async def create(self, asked: dict[str, Any]) -> DoubleSandbox:
        template = self.templates.get(asked.get("templateID", ""))
        if template is None:
            raise ApiError(404, f"template '{asked.get('templateID')}' not found")
        lifetime_s = _lifetime(asked)
        self._reserve()
        try:
            machine = Machine(
                asked.get("envVars") or {},
                has_python=template.has_python,
                outside=self._outside,
                python=template.python,
            )
            machine.wall.network = {"allow_internet_access": asked.get("allow_internet_access", True)}
            await machine.start()
        finally:
            self._creating -= 1
        now = self.now()
        sandbox = DoubleSandbox(
            sandbox_id="i" + secrets.token_hex(10),
            template=template,
            asked=asked,
            access_token=secrets.token_urlsafe(24) if self._secure else None,
            started_at=now,
            end_at=now + lifetime_s,
            machine=machine,
        )
        self.sandboxes[sandbox.sandbox_id] = sandbox
        self.created += 1
        self._set_timer(sandbox)
        _ = self._own(self._forget_at_end(sandbox))
        return sandbox

    async def _forget_at_end(self, sandbox: DoubleSandbox) -> None:
        """Forgets a sandbox whose machine ended by itself."""
        await sandbox.machine.wait_end()
        await self._destroy(sandbox)

    def _reserve(self) -> None:
        running = sum(sandbox.state == "running" for sandbox in self.sandboxes.values())
        if running + self._creating >= self.max_sandboxes:
            raise ApiError(429, f"you have reached the maximum number of concurrent sandboxes ({self.max_sandboxes})")
        self._creating += 1

    def _set_timer(self, sandbox: DoubleSandbox) -> None:
        if sandbox.timer is not None:
            sandbox.timer.cancel()
            sandbox.timer = None
        if sandbox.state == "running":
            wait_s = max(0.0, sandbox.end_at - self.now())
            sandbox.timer = asyncio.get_running_loop().call_later(wait_s, self._at_its_end, sandbox)

    def _at_its_end(self, sandbox: DoubleSandbox) -> None:
        sandbox.timer = None
        _ = self._own(self._pause(sandbox) if sandbox.asked.get("autoPause") else self._destroy(sandbox))

    async def _end(self, sandbox: DoubleSandbox) -> None:
        await asyncio.shield(self._own(self._destroy(sandbox)))

    async def _destroy(self, sandbox: DoubleSandbox) -> None:
        self.sandboxes.pop(sandbox.sandbox_id, None)
        if sandbox.timer is not None:
            sandbox.timer.cancel()
        await sandbox.machine.destroy()
        _cut_ways(sandbox)

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _pause(self, sandbox: DoubleSandbox) -> None:
        sandbox.state = "paused"
        self._set_timer(sandbox)
        await sandbox.machine.freeze()
        _cut_ways(sandbox)

    def _wake(self, sandbox: DoubleSandbox, lifetime_s: float) -> None:
        self._reserve()
        self._creating -= 1
        sandbox.machine.thaw()
        sandbox.state = "running"
        sandbox.started_at = self.now()
        sandbox.end_at = self.now() + lifetime_s
        self._set_timer(sandbox)

    # Requests

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        sandbox_id = request.headers.get("E2b-Sandbox-Id") or _id_in(request.path)
        path = re.sub(r"(?<=/sandboxes/)[^/]+", "{id}", request.path)
        fault = self._fault_for(request.method, path) if not self._is_down else None
        status: int | None = None
        transport = request.transport
        try:
            if self._is_down:
                raise Cut
            out = Outgoing(request, fault)
            response = await strike(fault, out, lambda: self._answer(request, out, sandbox_id, fault))
            status = response.status
        except (Cut, ConnectionError):
            if transport is not None:
                transport.abort()
            return web.Response(status=500)  # its connection is cut
        else:
            return response
        finally:
            if len(self.requests) < LOG_ENTRIES_MAX:
                kind = fault.kind if fault is not None else None
                self.requests.append(Request(request.method, path, sandbox_id, status, kind))

    def _fault_for(self, method: str, path: str) -> Fault | None:
        found = (rule.take(method, path) for rule in self._rules)
        return next((fault for fault in found if fault is not None), None)

    async def _answer(
        self, request: web.BaseRequest, out: Outgoing, sandbox_id: str | None, fault: Fault | None
    ) -> web.StreamResponse:
        is_traffic = "E2b-Sandbox-Id" in request.headers
        try:
            if fault is not None and fault.kind is Kind.VANISH and sandbox_id is not None:
                await self.vanish(sandbox_id)
            if is_traffic:
                return await self._traffic(request, out)
            return await self._rest(request)
        except ApiError as error:
            return error.response()
        except MachineError as error:
            return connect_error(error.code, str(error))
        except MachineMissing:
            if sandbox_id in self.sandboxes:  # its first process ended by itself
                await self.vanish(sandbox_id)
            return _not_found_502()

    async def _traffic(self, request: web.BaseRequest, out: Outgoing) -> web.StreamResponse:
        sandbox = self.sandboxes.get(request.headers["E2b-Sandbox-Id"])
        if sandbox is None or sandbox.state != "running" or sandbox.machine.has_ended:
            return _not_found_502()
        port = request.headers.get("E2b-Sandbox-Port")
        if port != ENVD_PORT:
            return web.json_response(
                {"message": "The sandbox is running but port is not open", "code": 502}, status=502
            )
        may = sandbox.access_token in (None, request.headers.get("X-Access-Token"))
        if not may and request.path != "/health":
            raise ApiError(401, "unauthorized access, please provide a valid access token")
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        sandbox.connections.add(transport)
        try:
            return await envd.answer(request, out, sandbox.machine)
        finally:
            sandbox.connections.discard(transport)

    async def _rest(self, request: web.BaseRequest) -> web.StreamResponse:
        if not secrets.compare_digest(request.headers.get("X-API-KEY", ""), self.api_key):
            raise ApiError(401, "Invalid API key")
        steps = [step for step in request.path.split("/") if step]
        if steps[:1] == ["v2"]:
            steps = steps[1:]
        match request.method, steps:
            case "POST", ["sandboxes"]:
                return web.json_response(self._created(await self._create_once(request)), status=201)
            case "GET", ["sandboxes"]:
                return self._list(request)
            case "GET", ["sandboxes", sandbox_id]:
                return web.json_response(self._detail(self._known(sandbox_id)))
            case "DELETE", ["sandboxes", sandbox_id]:
                await self._end(self._known(sandbox_id))
                return web.Response(status=204)
            case "PUT", ["sandboxes", sandbox_id, "network"]:
                self._known(sandbox_id).wall.network = await _object(request)
                return web.Response(status=204)
            case "POST", ["sandboxes", sandbox_id, action]:
                return await self._act(self._known(sandbox_id), action, await _object(request))
        raise ApiError(404, f"no {request.method} {request.path}")

    async def _create_once(self, request: web.BaseRequest) -> DoubleSandbox:
        """Returns the sandbox that was made with this idempotency key, as long as it lives."""
        asked = await _object(request)
        key = request.headers.get("Idempotency-Key")
        if key is None:
            return await asyncio.shield(self._own(self.create(asked)))
        if not IDEMPOTENCY_KEY.fullmatch(key):
            raise ApiError(400, "invalid Idempotency-Key")
        task = self._keyed.get(key)
        if task is None:
            task = self._keyed[key] = self._own(self.create(asked))
        try:
            sandbox = await asyncio.shield(task)
        except ApiError:
            self._keyed.pop(key, None)
            raise
        if sandbox.asked != asked:
            raise ApiError(409, "the Idempotency-Key was used for another request")
        return sandbox

    async def _act(self, sandbox: DoubleSandbox, action: str, asked: dict[str, Any]) -> web.Response:
        match action:
            case "timeout":
                if sandbox.state != "running":
                    raise ApiError(404, f"sandbox {sandbox.sandbox_id} is not running")
                sandbox.end_at = self.now() + _lifetime(asked)
                self._set_timer(sandbox)
                return web.Response(status=204)
            case "pause":
                if sandbox.state == "paused":
                    raise ApiError(409, f"sandbox {sandbox.sandbox_id} is already paused")
                await asyncio.shield(self._own(self._pause(sandbox)))
                return web.Response(status=204)
            case "connect":
                if sandbox.state == "paused":
                    self._wake(sandbox, _lifetime(asked))
                    return web.json_response(self._created(sandbox), status=201)
                sandbox.end_at = max(sandbox.end_at, self.now() + _lifetime(asked))  # connecting never shortens it
                self._set_timer(sandbox)
                return web.json_response(self._created(sandbox), status=200)
        raise ApiError(404, f"no action {action}")

    def _known(self, sandbox_id: str) -> DoubleSandbox:
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is None:
            raise ApiError(404, f"sandbox {sandbox_id} not found")
        return sandbox

    def _list(self, request: web.BaseRequest) -> web.Response:
        query = request.query
        wanted = {
            urllib.parse.unquote(name): urllib.parse.unquote(value)
            for name, value in urllib.parse.parse_qsl(query.get("metadata", ""))
        }
        states = query.get("state", "running,paused").split(",")
        found = [
            sandbox
            for sandbox in self.sandboxes.values()
            if sandbox.state in states and wanted.items() <= sandbox.metadata.items()
        ]
        found.sort(key=lambda sandbox: (sandbox.started_at, sandbox.sandbox_id), reverse=True)
        limit = min(int(query.get("limit", PAGE_MAX)), PAGE_MAX)
        if token := query.get("nextToken"):
            last = base64.urlsafe_b64decode(token).decode()
            at = next((number for number, one in enumerate(found) if one.sandbox_id == last), -1)
            found = found[at + 1 :]
        headers = {}
        if len(found) > limit:
            headers["x-next-token"] = base64.urlsafe_b64encode(found[limit - 1].sandbox_id.encode()).decode()
        return web.json_response([self._listed(sandbox) for sandbox in found[:limit]], headers=headers)

    def _created(self, sandbox: DoubleSandbox) -> dict[str, Any]:
        answer = {
            "templateID": sandbox.template.template_id,
            "sandboxID": sandbox.sandbox_id,
            "clientID": "double",
            "envdVersion": ENVD_VERSION,
        }
        if sandbox.access_token is not None:
            answer["envdAccessToken"] = sandbox.access_token
        return answer

    def _listed(self, sandbox: DoubleSandbox) -> dict[str, Any]:
        return {
            "templateID": sandbox.template.template_id,
            "sandboxID": sandbox.sandbox_id,
            "clientID": "double",
            "envdVersion": ENVD_VERSION,
            "startedAt": _iso(sandbox.started_at),
            "endAt": _iso(sandbox.end_at),
            "cpuCount": 2,
            "memoryMB": 512,
            "diskSizeMB": 512,
            "state": sandbox.state,
            "metadata": sandbox.metadata,
        }

    def _detail(self, sandbox: DoubleSandbox) -> dict[str, Any]:
        return {**self._listed(sandbox), **self._created(sandbox)}


def _lifetime(asked: Mapping[str, Any]) -> float:
    lifetime = asked.get("timeout", DEFAULT_LIFETIME_S)
    if not isinstance(lifetime, int) or not 0 <= lifetime <= LIFETIME_MAX_S:
        raise ApiError(400, f"timeout must be from 0 to {LIFETIME_MAX_S}")
    return lifetime


async def _object(request: web.BaseRequest) -> dict[str, Any]:
    body = await request.read()
    try:
        asked = json.loads(body or b"{}")
    except ValueError:
        raise ApiError(400, "the body is no JSON") from None
    if not isinstance(asked, dict):
        raise ApiError(400, "the body is no object")
    return asked


def _id_in(path: str) -> str | None:
    found = re.search(r"/sandboxes/([^/]+)", path)
    return found[1] if found else None


def _not_found_502() -> web.Response:
    return web.json_response({"message": "The sandbox was not found", "code": 502}, status=502)


def _cut_ways(sandbox: DoubleSandbox) -> None:
    for transport in list(sandbox.connections):
        transport.abort()


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")
