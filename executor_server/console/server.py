"""The console as a process: from the configuration to pages that are served, until a signal stops it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import cast

from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP1Settings
from granian.server.embed import Server
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from executor_server.console import (
    actions,
    approvals,
    audit,
    environments,
    fleet,
    overview,
    policy,
    recordings,
    refusals,
    session,
    sessions,
)
from executor_server.console.access import SIGN_IN_PATH, STATIC_PATH, Access, Guard
from executor_server.console.console import Console
from executor_server.console.daemon import Daemon, DaemonError, channel_to
from executor_server.core import AddressError, TcpAddress, UnixAddress, addresses
from executor_server.core.config import (
    AlreadyRunning,
    Config,
    ConsoleSection,
    StateDir,
    StateDirError,
    claim,
    read_token,
)

PAGES = (overview, sessions, session, approvals, refusals, recordings, environments, fleet, audit, policy, actions)
CONNECTIONS_MAX = 1024
IDLE_MAX_MS = 5_000
"""Milliseconds for the head of a request, and between two of a connection."""
STOP_GRACE_S = 2.0
"""Seconds for requests to end when the console stops. Streams end at once."""
STATIC_AGE_S = 3600

_STATIC = Path(__file__).parent / "static"
_FILES = {str(path.relative_to(_STATIC)): path for path in _STATIC.rglob("*") if path.suffix in (".css", ".js", ".svg")}


class ConsoleError(Exception):
    """The console can't start; the message is a sentence that says why."""


def serve(config: Config) -> None:
    """Serves until SIGTERM or SIGINT. Raises AddressError, StateDirError and ConsoleError."""
    section = config.console
    address = addresses.parse(section.listen)
    assert isinstance(address, TcpAddress)  # checked by the section
    if not address.is_loopback and section.tls_cert is None:
        raise AddressError(
            f"{address} is reachable from other machines, and its pages would be sent unencrypted. Set "
            "console.tls_cert and console.tls_key, or listen on 127.0.0.1."
        )
    if address.host in ("0.0.0.0", "::") and not section.hosts:
        raise AddressError(f"{address} is every address of this machine. Set console.hosts to the name for browsers.")
    addresses.check_port(address)  # granian would share the port with another console
    try:
        with claim(config.server.state_dir / "console") as state:
            asyncio.run(_serve(config, state, address))
    except AlreadyRunning as error:
        raise StateDirError(
            f"Another console is running with the state directory {config.server.state_dir}. Stop it, or start this "
            "one with --state-dir for another directory, --daemon and --token-file."
        ) from error


def link(config: Config) -> str:
    """Returns the one-time link of the running console. Raises StateDirError."""
    try:
        return _link_path(config.server.state_dir / "console").read_text().strip()
    except OSError as error:
        raise StateDirError(
            f"No console runs with the state directory {config.server.state_dir}. Start one with `executor-server "
            "console`."
        ) from error


def _link_path(directory: Path) -> Path:
    return directory / "link"


async def _serve(config: Config, state: StateDir, address: TcpAddress) -> None:
    section = config.console
    own = StateDir(config.server.state_dir)
    daemon_address = section.daemon or f"unix:{own.socket_path}"
    path = _link_path(state.root)
    scheme = "http" if section.tls_cert is None else "https"
    names = section.hosts or ((f"localhost:{address.port}", str(address)) if address.is_loopback else (str(address),))

    def keep_link(link: str) -> None:
        # Nobody may read it who could not read the token.
        new = path.with_name("link.new")
        new.touch(mode=0o600)
        new.write_text(f"{link}\n")
        new.replace(path)

    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        channel = channel_to(daemon_address, section.daemon_tls_ca, tls=_needs_tls(daemon_address, section))
    except OSError as error:
        raise ConsoleError(f"{section.daemon_tls_ca} can't be read: {error.strerror}.") from error
    try:
        async with Daemon(
            channel, daemon_address, lambda: _token(section, own, daemon_address), approves=section.actions
        ) as daemon:
            access = Access(f"{scheme}://{names[-1]}", keep_link)
            console = Console(daemon, actions=section.actions)
            server = _server(section, address, application(console, access, frozenset(names)))
            server.on_startup(lambda: _announce(path.read_text().strip()))
            serving = asyncio.create_task(server.serve())
            stopping = asyncio.create_task(stopped.wait())
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            access.stop()
            server.stop()  # type: ignore[no-untyped-call]
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_GRACE_S):
                    await serving
            await console.watches.stop()
    finally:
        path.unlink(missing_ok=True)


def _announce(link: str) -> None:
    """Tells people, and programs that wait, that the console is there."""
    sys.stdout.write(
        f"executor-server console: open {link} (works once; `executor-server console --link` prints another)\n"
    )
    sys.stdout.flush()


def _token(section: ConsoleSection, own: StateDir, daemon: str) -> str:
    """Returns the token of `token_file`, else the state directory's. Raises DaemonError."""
    path = section.token_file or own.token_path
    if section.token_file is None:
        address = addresses.parse(daemon)
        if isinstance(address, TcpAddress) and not address.is_loopback:
            raise _no_token(f"{daemon} is on another machine. Name the file with a token for it (console.token_file).")
        if isinstance(address, UnixAddress) and not _is_own(address.path):
            raise _no_token(f"No daemon of this user listens on {daemon}. Start it with `executor-server serve`.")
    try:
        return read_token(path)
    except FileNotFoundError:
        raise _no_token(f"The token file {path} does not exist. Start the daemon, or set console.token_file.") from None
    except StateDirError as error:
        raise _no_token(str(error)) from error


def _is_own(path: Path) -> bool:
    """True for a socket of this user or root: another user's must not get the token."""
    try:
        return path.stat().st_uid in (os.geteuid(), 0)
    except OSError:
        return False


def _no_token(text: str) -> DaemonError:
    return DaemonError("UNAVAILABLE", "", text)


def _needs_tls(daemon: str, section: ConsoleSection) -> bool:
    parsed = addresses.parse(daemon)
    return section.daemon_tls_ca is not None or (isinstance(parsed, TcpAddress) and not parsed.is_loopback)


def application(console: Console, access: Access, hosts: frozenset[str]) -> ASGIApp:
    """Returns the console as an application."""

    async def sign_in(request: Request) -> Response:
        cookie = access.sign_in(request.query_params.get("code", ""))
        if cookie is None:
            raise HTTPException(403, "This link was used already, or is not this console's.")
        # Not a redirect: a strict cookie is not sent to the page that a link on another site leads to.
        return HTMLResponse(console.fragment("signed_in.html"), headers={"set-cookie": cookie})

    async def sign_out(request: Request) -> Response:
        cookie = access.sign_out(request.state.browser)
        return RedirectResponse("/", 303, headers={"set-cookie": cookie})

    async def static(request: Request) -> Response:
        path = _FILES.get(request.path_params["path"])
        if path is None:
            raise HTTPException(404, "There is no such file.")
        return FileResponse(path, headers={"cache-control": f"max-age={STATIC_AGE_S}"})

    async def events(request: Request) -> Response:
        return console.events(request)

    async def refused(request: Request, error: Exception) -> Response:
        found = cast("HTTPException", error)
        is_unknown = found.detail == HTTPStatus.NOT_FOUND.phrase  # by Starlette: no route has this path
        return console.problem(request, found.status_code, "There is no such page." if is_unknown else found.detail)

    async def daemon_failed(request: Request, error: Exception) -> Response:
        return console.daemon_problem(request, cast("DaemonError", error))

    async def failed(request: Request, _error: Exception) -> Response:
        return console.problem(request, 500, "The console failed. Its log has the reason.")

    routes: list[BaseRoute] = [
        Route(SIGN_IN_PATH, sign_in),
        Route("/sign-out", sign_out, methods=["POST"]),
        Route(f"{STATIC_PATH}{{path:path}}", static),
        Route("/events", events),
        *(route for page in PAGES for route in page.routes(console)),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: refused, DaemonError: daemon_failed, 500: failed})
    app.router.redirect_slashes = False
    return Guard(app, access, hosts, console.problem)


def _server(section: ConsoleSection, address: TcpAddress, app: ASGIApp) -> Server:
    try:
        return Server(
            app,
            address=socket.gethostbyname(address.host) if ":" not in address.host else address.host,
            port=address.port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,  # with `auto` a connection that sends nothing would never end
            http1_settings=HTTP1Settings(header_read_timeout=IDLE_MAX_MS),
            backlog=CONNECTIONS_MAX,
            log_enabled=False,
            ssl_cert=section.tls_cert,
            ssl_key=section.tls_key,
            ssl_protocol_min=SSLProtocols.tls12,
        )
    except (OSError, ssl.SSLError) as error:
        raise ConsoleError(f"{section.tls_cert} and {section.tls_key} can't be used: {error}") from error
