"""E2B's REST interface of an account: create, find, list, prolong and end sandboxes.

The caller's key is a token of the daemon, which authenticates it and knows the caller's sessions. To other tenants a
sandbox does not exist.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import secrets
import sqlite3
import time
import urllib.parse
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar
from weakref import WeakValueDictionary

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from executor_client._core.requests import freely_allowed
from executor_client.aio import AsyncExecutorClient
from executor_client.aio_session import AsyncSession
from executor_client.errors import NotFoundError
from executor_client.results import Limits, Policy, SessionInfo, SessionState
from executor_server.core.config import GatewaySection
from executor_server.gateway.bodies import json_of, refusal_of_values
from executor_server.gateway.clients import Clients
from executor_server.gateway.e2b import metrics
from executor_server.gateway.e2b.errors import REFUSALS, not_offered
from executor_server.gateway.e2b.records import Record, Sandboxes, is_same
from executor_server.gateway.errors import Refusal

ENVD_VERSION = "0.6.7"
"""SDKs use the features of this version of E2B's daemon."""
CLIENT_ID = "remote-executor"
BODY_BYTES_MAX = 1 << 20
METADATA_MAX = 64
METADATA_CHARS_MAX = 4096
"""Characters of a name or a value."""
PAGE_MAX = 100
V1_TIMEOUT_S, V2_TIMEOUT_S = 15, 300
"""Seconds that a sandbox lives if the caller names no timeout, by the version of the path."""
SECONDS_MAX = 1 << 40
"""Keeps times in their range; the policy allows fewer seconds."""
CPU_COUNT = 1
"""The daemon shares its CPUs among sandboxes and reserves none, but the protocol requires a number."""
EVERYTHING = frozenset({"0.0.0.0/0", "::/0"})
"""All addresses, in the lists of a network."""

_KEY = re.compile(r"[a-z0-9-]{1,255}")
# Paths of E2B's interface. Every other path is unknown.
_NOT_OFFERED = re.compile(
    r"(/v[23])?(/sandboxes/[^/]+/(pause|resume|fork|snapshots|logs|network)|/(templates|snapshots|volumes|secrets|teams)(/.*)?)"
)
_MIB = 1 << 20
_EPOCH = datetime.fromtimestamp(0, UTC)
M = TypeVar("M", bound=BaseModel)


# ---------------------------------------------------------------------------------------------------------------------
# Requests. Unknown fields are kept, so that `_refuse_unknown` can refuse them if they are set.

_Seconds = Annotated[int, Field(ge=0, le=SECONDS_MAX)]
_Texts = Annotated[
    dict[
        Annotated[str, Field(max_length=METADATA_CHARS_MAX)],
        Annotated[str, Field(max_length=METADATA_CHARS_MAX)],
    ],
    Field(max_length=METADATA_MAX),
]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class _AutoResume(_Body):
    enabled: bool = False


class _Network(_Body):
    allow_out: list[str] | None = Field(None, alias="allowOut")
    deny_out: list[str] | None = Field(None, alias="denyOut")
    allow_public_traffic: bool | None = Field(None, alias="allowPublicTraffic")


class _Create(_Body):
    template: str = Field(alias="templateID", min_length=1, max_length=256)
    timeout: _Seconds | None = None
    metadata: _Texts | None = None
    env: dict[str, str] | None = Field(None, alias="envVars")
    internet: bool | None = Field(None, alias="allow_internet_access")
    network: _Network | None = None
    auto_pause: bool | None = Field(None, alias="autoPause")
    auto_resume: _AutoResume | None = Field(None, alias="autoResume")
    secure: bool | None = None  # access tokens are always required
    auto_pause_memory: bool | None = Field(None, alias="autoPauseMemory")  # without autoPause it means nothing


class _Timeout(_Body):
    timeout: _Seconds


class _Connect(_Body):
    timeout: _Seconds = V2_TIMEOUT_S
    memory: bool | None = None  # about paused sandboxes


class _Refresh(_Body):
    duration: _Seconds = V1_TIMEOUT_S


def _in_utc(given: datetime) -> datetime:
    try:
        return given.astimezone(UTC)
    except OverflowError as error:  # pydantic would let it pass
        raise ValueError("it is out of range") from error


class _List(BaseModel):
    limit: int = Field(PAGE_MAX, ge=1, le=PAGE_MAX)
    state: str = "running"
    order: str = "desc"
    next_token: str = Field("", alias="nextToken")
    metadata: str = ""
    template: str | None = None
    started_after: Annotated[datetime, AfterValidator(_in_utc)] = Field(_EPOCH, alias="startedAfter")


class _Span(BaseModel):
    start: int = 0
    end: int = SECONDS_MAX


async def _body(request: Request, kind: type[M]) -> M:
    """Reads and validates the body. Raises Refusal (400, 413, 501)."""
    body = await json_of(request, kind, BODY_BYTES_MAX)
    _refuse_unknown(body)
    return body


def _query(request: Request, kind: type[M]) -> M:
    """Reads the query. Raises Refusal (400)."""
    try:
        return kind.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise refusal_of_values(error) from None


def _refuse_unknown(body: BaseModel) -> None:
    for name, value in (body.model_extra or {}).items():
        if value:
            raise not_offered(f"the field {name[:64]!r}")


def _key_of(request: Request) -> str:
    key = request.headers.get("x-api-key")
    if not key:
        raise Refusal(401, "no API key: send a token of `executor-server token new --form e2b` in X-API-Key")
    return key


# ---------------------------------------------------------------------------------------------------------------------


def rest_app(section: GatewaySection, clients: Clients, sandboxes: Sandboxes) -> Starlette:
    """Returns the application for the paths of E2B's REST interface."""
    return _Account(section, clients, sandboxes).application()


class _Account:
    def __init__(self, section: GatewaySection, clients: Clients, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._client = clients.of
        self._templates = section.templates
        self._domain = section.domain
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def application(self) -> Starlette:
        one = "/sandboxes/{sandbox_id}"
        routes = [
            *(Route(f"{version}/sandboxes", self._create, methods=["POST"]) for version in ("", "/v2")),
            Route("/sandboxes", self._list_running, methods=["GET"]),
            Route("/v2/sandboxes", self._list, methods=["GET"]),
            Route(one, self._info, methods=["GET"]),
            Route(one, self._kill, methods=["DELETE"]),
            *(Route(f"{version}{one}/connect", self._connect, methods=["POST"]) for version in ("", "/v2")),
            Route(f"{one}/timeout", self._set_timeout, methods=["POST"]),
            Route(f"{one}/refreshes", self._refresh, methods=["POST"]),
            Route(f"{one}/metrics", self._metrics, methods=["GET"]),
            Route("/templates/aliases/{alias}", self._alias, methods=["GET"]),
        ]
        return Starlette(
            routes=routes,
            exception_handlers={**REFUSALS, HTTPException: _no_route},
        )

    # Creation

    async def _create(self, request: Request) -> Response:
        key = _key_of(request)
        client = await self._client(key)
        asked = await _body(request, _Create)
        if asked.auto_pause or (asked.auto_resume is not None and asked.auto_resume.enabled):
            raise not_offered("autoPause", "sandboxes end at their timeout, and are never paused")
        if asked.timeout is None:
            is_v2 = request.url.path.startswith("/v2/")
            asked = asked.model_copy(update={"timeout": V2_TIMEOUT_S if is_v2 else V1_TIMEOUT_S})
        sandbox_id = _sandbox_id(key, request.headers.get("idempotency-key"))
        # Repeated requests with one idempotency key have one id, and wait here for each other.
        async with self._locks.setdefault(sandbox_id, asyncio.Lock()):
            found = await self._running(client, sandbox_id, key)
            record = found[0] if found is not None else await self._made(client, key, asked, sandbox_id)
        if record.request != _digest(asked):
            raise Refusal(409, "the Idempotency-Key was used for another request")
        return JSONResponse(self._created(record), 201)

    async def _made(self, client: AsyncExecutorClient, key: str, asked: _Create, sandbox_id: str) -> Record:
        policy = await client.get_policy()
        image = self._image(asked.template, policy)
        timeout_s = asked.timeout or 0
        _check_end(timeout_s, policy.max_limits)
        session = await client.create_session(
            image,
            freely_allowed(policy),
            {"session_time_s": policy.max_limits.session_time_s or 0.0},
            labels={"client": "e2b", "sandbox": sandbox_id},
            network=_network(asked, policy),
            detached=True,
            env=asked.env,
        )
        now = time.time()
        record = Record(
            sandbox_id=sandbox_id,
            session_id=session.session_id,
            token=key,
            access_token=secrets.token_urlsafe(24),
            template=asked.template,
            create_time=now,
            end_time=now + timeout_s,
            idle_time_s=session.info.limits.idle_time_s or 0.0,
            traffic_token=secrets.token_urlsafe(24) if _is_private(asked) else "",
            metadata=asked.metadata or {},
            request=_digest(asked),
        )
        try:
            self._sandboxes.keep(record)
        except sqlite3.Error:
            await session.close()
            raise
        return record

    def _image(self, template: str, policy: Policy) -> str:
        """Returns the image of a template, whose name may have the default tag. Raises Refusal (404)."""
        name = template.removesuffix(":default")
        image = self._templates.get(name, name)
        if image not in policy.images:
            names = (*policy.images, *(each for each, leads_to in self._templates.items() if leads_to in policy.images))
            raise Refusal(404, f"template {template[:256]!r} not found: there are {_listed(names)}")
        return image

    async def _alias(self, request: Request) -> Response:
        """Answers whether there is a template of this name."""
        client = await self._client(_key_of(request))
        self._image(request.path_params["alias"], await client.get_policy())
        return JSONResponse({"templateID": request.path_params["alias"], "public": False})

    # One sandbox

    async def _running(
        self, client: AsyncExecutorClient, sandbox_id: str, key: str
    ) -> tuple[Record, AsyncSession] | None:
        """Returns a sandbox of the caller, or None."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None:
            return None
        try:
            session = await client.get_session(sandbox.record.session_id)
            if session.info.state is not SessionState.LOST:
                # A DELETE may have come meanwhile.
                return (sandbox.record, session) if self._sandboxes.get(sandbox_id) is sandbox else None
            await session.close()
        except NotFoundError:
            if not is_same(key, sandbox.record.token):
                return None  # another tenant's, perhaps
        self._sandboxes.forget(sandbox.record)
        return None

    async def _owned(self, request: Request) -> tuple[Record, AsyncSession]:
        """Returns the sandbox of the path, as it is until the next `await`. Raises Refusal (401, 404)."""
        key, sandbox_id = _key_of(request), request.path_params["sandbox_id"]
        found = await self._running(await self._client(key), sandbox_id, key)
        if found is None:
            raise Refusal(404, f"sandbox {sandbox_id[:64]!r} not found")
        return found

    async def _info(self, request: Request) -> Response:
        record, session = await self._owned(request)
        lifecycle = {"autoResume": False, "onTimeout": "kill"}
        described = {"allowInternetAccess": bool(session.info.network), "lifecycle": lifecycle}
        return JSONResponse({**_listing(record, session.info), **self._created(record), **described})

    async def _kill(self, request: Request) -> Response:
        record, session = await self._owned(request)
        # Forgotten first: of two callers at one time, only one gets a success.
        self._sandboxes.forget(record)
        try:
            await session.close()
        except BaseException:
            if self._sandboxes.get(record.sandbox_id) is None:  # else an Idempotency-Key has made it again
                self._sandboxes.keep(record)
            raise
        return Response(status_code=204)

    async def _body_of_change(self, request: Request, kind: type[M]) -> M:
        """Reads the body of a caller who is authenticated. `_owned` comes after it: a body may take long to arrive."""
        await self._client(_key_of(request))
        return await _body(request, kind)

    async def _connect(self, request: Request) -> Response:
        asked = await self._body_of_change(request, _Connect)
        record, session = await self._owned(request)
        # The key may be newer than the one of the creation, which may be revoked.
        record = replace(record, token=_key_of(request))
        return JSONResponse(self._created(self._prolong(record, session, asked.timeout)))

    async def _set_timeout(self, request: Request) -> Response:
        asked = await self._body_of_change(request, _Timeout)
        record, session = await self._owned(request)
        self._end_in(record, session, asked.timeout)
        return Response(status_code=204)

    async def _refresh(self, request: Request) -> Response:
        asked = await self._body_of_change(request, _Refresh)
        record, session = await self._owned(request)
        self._prolong(record, session, asked.duration)
        return Response(status_code=204)

    def _prolong(self, record: Record, session: AsyncSession, timeout_s: int) -> Record:
        """Moves the end of a sandbox to `timeout_s` from now, unless it is later already."""
        if time.time() + timeout_s > record.end_time:
            return self._end_in(record, session, timeout_s)
        self._sandboxes.keep(record)
        return record

    def _end_in(self, record: Record, session: AsyncSession, timeout_s: int) -> Record:
        _check_end(time.time() - record.create_time + timeout_s, session.info.limits)
        record = replace(record, end_time=time.time() + timeout_s)
        self._sandboxes.keep(record)
        return record

    async def _metrics(self, request: Request) -> Response:
        span = _query(request, _Span)
        record, session = await self._owned(request)
        now = time.time()
        if span.start > now or span.end < int(now):
            return JSONResponse([])
        return JSONResponse([await metrics.sample(session, record.create_time)])

    # Lists

    async def _list_running(self, request: Request) -> Response:
        return JSONResponse([_listing(*each) for each in await self._found(request, _query(request, _List))])

    async def _list(self, request: Request) -> Response:
        query = _query(request, _List)
        if "running" not in query.state.split(","):
            return JSONResponse([])
        found = await self._found(request, query)
        is_asc = query.order == "asc"
        if query.next_token:
            last = _place_of(query.next_token)
            found = [each for each in found if _place(each[0]) != last and (_place(each[0]) > last) is is_asc]
        if not is_asc:
            found.reverse()
        page = found[: query.limit]
        headers = {"x-next-token": _token_of(page[-1][0])} if len(found) > query.limit else {}
        return JSONResponse([_listing(*each) for each in page], headers=headers)

    async def _found(self, request: Request, query: _List) -> list[tuple[Record, SessionInfo]]:
        """Returns the caller's sandboxes that match the query, oldest first."""
        metadata = _metadata_of(query.metadata)
        client = await self._client(_key_of(request))
        infos = {each.session_id: each for each in await client.list_sessions() if each.state is not SessionState.LOST}
        found = [
            (sandbox.record, infos[sandbox.record.session_id])
            for sandbox in self._sandboxes.running()
            if sandbox.record.session_id in infos
            and metadata.items() <= sandbox.record.metadata.items()
            and _moment(sandbox.record.create_time) >= query.started_after  # to the microsecond, as in the answers
            and query.template in (None, sandbox.record.template)
        ]
        return sorted(found, key=lambda each: _place(each[0]))

    # Answers

    def _created(self, record: Record) -> dict[str, Any]:
        answer = {
            "templateID": record.template,
            "sandboxID": record.sandbox_id,
            "clientID": CLIENT_ID,
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": record.access_token,
        }
        # SDKs authenticate requests about contexts of the interpreter by the traffic token alone.
        optional = {"trafficAccessToken": record.traffic_token or record.access_token, "domain": self._domain}
        return answer | {name: value for name, value in optional.items() if value}


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if _NOT_OFFERED.fullmatch(path):
        return not_offered(f"{request.method} {path[:200]}").response()
    return Refusal(error.status_code, error.detail).response()


def _digest(asked: _Create) -> str:
    return hashlib.sha256(asked.model_dump_json().encode()).hexdigest()


def _sandbox_id(key: str, idempotency_key: str | None) -> str:
    """Returns a DNS label: random, or derived from the idempotency key."""
    if idempotency_key is None:
        return "i" + secrets.token_hex(10)
    if _KEY.fullmatch(idempotency_key) is None:
        raise Refusal(400, "Idempotency-Key must have 1 to 255 of a-z 0-9 -")
    return "i" + hashlib.sha256(f"{key}\0{idempotency_key}".encode()).hexdigest()[:20]


def _check_end(age_s: float, limits: Limits) -> None:
    most_s = limits.session_time_s or 0.0
    if age_s > most_s:
        raise Refusal(
            400,
            f"timeout is too long: a sandbox would live {age_s:.0f} s, and the policy's limits.max.session_time_s is "
            f"{most_s:.0f}",
        )


def _is_private(asked: _Create) -> bool:
    return asked.network is not None and asked.network.allow_public_traffic is False


def _network(asked: _Create, policy: Policy) -> list[str]:
    """Returns the hosts to request from the policy. Raises Refusal for a network that no session can have."""
    hosts: list[str] = []
    denied: list[str] = []
    if asked.network is not None:
        _refuse_unknown(asked.network)
        hosts, denied = asked.network.allow_out or [], asked.network.deny_out or []
    if not EVERYTHING.issuperset(denied):
        raise not_offered("denyOut with single addresses", "a sandbox reaches only the hosts that its policy names")
    if EVERYTHING.intersection(hosts):
        raise Refusal(403, "allowOut: all addresses are not granted; name the hosts that the sandbox needs")
    if asked.internet is False and hosts:
        raise Refusal(400, "allow_internet_access is false, but network.allowOut names hosts")
    if (asked.internet is False or denied) and policy.network.default:
        raise not_offered(
            "a sandbox without the policy's default hosts",
            f"every session of this policy reaches {_listed(policy.network.default)}; use a key of a policy without",
        )
    return hosts


def _listing(record: Record, info: SessionInfo) -> dict[str, Any]:
    return {
        "templateID": record.template,
        "sandboxID": record.sandbox_id,
        "clientID": CLIENT_ID,
        "envdVersion": ENVD_VERSION,
        "startedAt": _iso(record.create_time),
        "endAt": _iso(record.end_time),
        "cpuCount": CPU_COUNT,
        "memoryMB": (info.limits.memory_bytes or 0) // _MIB,
        "diskSizeMB": (info.limits.disk_bytes or 0) // _MIB,
        "state": "running",
        "metadata": dict(record.metadata),
    }


def _iso(seconds: float) -> str:
    return _moment(seconds).isoformat().replace("+00:00", "Z")


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:20]) or "none"


def _metadata_of(query: str) -> dict[str, str]:
    """Reads a filter: a query within the query, whose names and values the SDK quotes once more."""
    try:
        pairs = urllib.parse.parse_qsl(query, keep_blank_values=True, max_num_fields=METADATA_MAX)
    except ValueError:
        raise Refusal(400, f"metadata names more than {METADATA_MAX} values") from None
    return {urllib.parse.unquote(name): urllib.parse.unquote(value) for name, value in pairs}


def _place(record: Record) -> tuple[float, str]:
    """Returns the place of a record in a list."""
    return record.create_time, record.sandbox_id


def _token_of(record: Record) -> str:
    return base64.urlsafe_b64encode(json.dumps(_place(record)).encode()).decode()


def _place_of(token: str) -> tuple[float, str]:
    try:
        create_time, sandbox_id = json.loads(base64.urlsafe_b64decode(token[:256]))
        return float(create_time), str(sandbox_id)
    except (ValueError, TypeError, RecursionError):
        raise Refusal(400, "nextToken is not one of this gateway") from None
