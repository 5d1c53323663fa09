"""The console as a process: from the configuration to pages that are served, until a signal stops it."""

from __future__ import annotations

import os
import sys
from http import HTTPStatus
from pathlib import Path
from typing import cast

from granian.constants import HTTPModes
from granian.http import HTTP1Settings
from granian.server.embed import Server
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from executor_server import web
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
from executor_server.core.config import Config, ConsoleSection, StateDir, StateDirError, read_token
from executor_server.web import StartError

PAGES = (overview, sessions, session, approvals, refusals, recordings, environments, fleet, audit, policy, actions)
CONNECTIONS_MAX = 1024
IDLE_MAX_MS = 5_000
"""Milliseconds for the head of a request, and between two of a connection."""
STATIC_AGE_S = 3600

_STATIC = Path(__file__).parent / "static"
_FILES = {str(path.relative_to(_STATIC)): path for path in _STATIC.rglob("*") if path.suffix in (".css", ".js", ".svg")}


def serve(config: Config) -> None:
    """Serves until SIGTERM or SIGINT. Raises AddressError, StateDirError and StartError."""
    web.run("console", config, _serve)


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
    if address.host in ("0.0.0.0", "::") and not section.hosts:
        raise AddressError(f"{address} is every address of this machine. Set console.hosts to the name for browsers.")
    own = StateDir(config.server.state_dir)
    daemon_address = web.daemon_address(config, section)
    path = _link_path(state.root)
    names = section.hosts or ((f"localhost:{address.port}", str(address)) if address.is_loopback else (str(address),))

    def keep_link(link: str) -> None:
        # Only users who can read the token may read it.
        new = path.with_name("link.new")
        new.touch(mode=0o600)
        new.write_text(f"{link}\n")
        new.replace(path)

    try:
        channel = channel_to(daemon_address, section.daemon_tls_ca, tls=web.daemon_needs_tls(section, daemon_address))
    except OSError as error:
        raise StartError(f"{section.daemon_tls_ca} can't be read: {error.strerror}.") from error
    try:
        async with Daemon(
            channel, daemon_address, lambda: _token(section, own, daemon_address), approves=section.actions
        ) as daemon:
            access = Access(f"{web.scheme(section)}://{names[-1]}", keep_link)
            console = Console(daemon, actions=section.actions)
            server = _server(section, address, application(console, access, frozenset(names)))

            async def stop() -> None:
                access.stop()
                await console.watches.stop()

            await web.until_stopped(server, address, lambda: _announce(path.read_text().strip()), stop)
    finally:
        path.unlink(missing_ok=True)


def _announce(link: str) -> None:
    """Prints the link, for people and for programs that wait until the console is there."""
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
        if section.token_file is not None:
            return read_token(path, remedy="write another token with the mode 600 (console.token_file)")
        return read_token(path)
    except FileNotFoundError:
        todo = "Start the daemon, or set" if section.token_file is None else "Correct"
        raise _no_token(f"The token file {path} does not exist. {todo} console.token_file.") from None
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
    # HTTP/1.1 has this limit on idle connections, `auto` has none.
    settings = HTTP1Settings(header_read_timeout=IDLE_MAX_MS)
    return web.server(section, address, app, http=HTTPModes.http1, http1_settings=settings, backlog=CONNECTIONS_MAX)
