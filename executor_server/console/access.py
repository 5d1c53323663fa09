"""Who may use the console: a one-time link, a strict cookie, a CSRF token, a known Host; and every response's headers.

Whoever reads the link from the terminal or from the private file becomes a signed-in browser. Nothing else leads in.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BROWSERS_MAX = 256
"""Browsers that are signed in. One more signs out the one that signed in first."""
SIGNED_IN_S = 24 * 3600.0
FORM_BYTES_MAX = 64 * 1024
UPLOAD_BYTES_MAX = 64 * 1024 * 1024
"""Of a form with a file (multipart)."""
FORM_FIELDS_MAX = 64
SIGN_IN_PATH = "/sign-in"
STATIC_PATH = "/static/"
CSRF_FIELD = "csrf"
CSRF_HEADER = "x-csrf-token"

_FOREIGN = "The request comes from another site."
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "content-security-policy": _CSP,
    "x-content-type-options": "nosniff",
    # With "no-referrer", browsers send `Origin: null` with our own forms, too.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(eq=False)
class Browser:
    """A browser that has signed in."""

    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """The token that its forms send back."""
    expires: float = field(default_factory=lambda: time.monotonic() + SIGNED_IN_S)
    """Monotonic."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has signed out. Its streams end then."""

    @property
    def is_signed_in(self) -> bool:
        return not self.ended.is_set() and time.monotonic() < self.expires


class Access:
    """The browsers that have signed in, and the code of the next one-time link."""

    def __init__(self, url: str, on_link: Callable[[str], None]) -> None:
        """`on_link` gets each new link: the first one now, and the next when one was used."""
        self._url = url
        self._on_link = on_link
        self._browsers: dict[bytes, Browser] = {}
        self._is_secure = url.startswith("https:")
        # Cookies don't know ports: two consoles on one machine must not sign each other out.
        # With the prefix, browsers reject a cookie of this name from a sandbox's page at another host of the domain.
        self._cookie = f"{'__Host-' if self._is_secure else ''}executor-console-{url.rpartition(':')[2].strip('/')}"
        self._new_link()

    def sign_in(self, code: str) -> str | None:
        """Returns the Set-Cookie header of a new browser and uses up the link; None if the code is not the link's."""
        if not hmac.compare_digest(code.encode(), self._code.encode()):
            return None
        self._new_link()
        if len(self._browsers) >= BROWSERS_MAX:
            self._browsers.pop(next(iter(self._browsers))).ended.set()
        secret = secrets.token_urlsafe(32)
        self._browsers[_key(secret)] = Browser()
        return self._set_cookie(secret, int(SIGNED_IN_S))

    def sign_out(self, browser: Browser) -> str:
        """Returns the Set-Cookie header that removes the cookie."""
        browser.ended.set()
        self._browsers = {key: each for key, each in self._browsers.items() if each.is_signed_in}
        return self._set_cookie("", 0)

    def browser(self, headers: Headers) -> Browser | None:
        """Returns the signed-in browser that a request is from."""
        # Not by http.cookies, whose time is quadratic in Python before 3.12.6. Pages of other ports of this host, maybe
        # of a sandbox, can set cookies of any name.
        for each in headers.get("cookie", "").split(";"):
            name, _, value = each.strip().partition("=")
            found = self._browsers.get(_key(value)) if name == self._cookie else None
            if found is not None and found.is_signed_in:
                return found
        return None

    def stop(self) -> None:
        for browser in self._browsers.values():
            browser.ended.set()

    def _new_link(self) -> None:
        self._code = secrets.token_urlsafe(32)
        self._on_link(f"{self._url}{SIGN_IN_PATH}?code={quote(self._code)}")

    def _set_cookie(self, value: str, max_age_s: int) -> str:
        secure = "; Secure" if self._is_secure else ""
        return f"{self._cookie}={value}; Path=/; Max-Age={max_age_s}; HttpOnly; SameSite=Strict{secure}"


def _key(secret: str) -> bytes:
    """Keys are hashes, so that the time of a look-up tells nothing about a secret."""
    return sha256(secret.encode("utf-8", "surrogatepass")).digest()


class Guard:
    """Lets signed-in browsers through. Sets `request.state.browser`, and `request.state.form` of a POST.

    Each POST must have the browser's CSRF token in the field `csrf` or the header `X-CSRF-Token`, and comes from a page
    of this console. So no page has to remember it.
    """

    def __init__(
        self, app: ASGIApp, access: Access, hosts: frozenset[str], refuse: Callable[[Request, int, str], Response]
    ) -> None:
        """`hosts` are the accepted Host headers. `refuse` makes the page for a refusal (status, text)."""
        self._app = app
        self._access = access
        self._hosts = hosts
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        headers = Headers(scope=scope)
        browser = self._access.browser(headers)
        scope["state"] = {"browser": browser}
        request = Request(scope, _bounded(headers, receive))
        try:
            await self._check(request, headers, browser)
        except HTTPException as error:
            await self._refuse(request, error.status_code, error.detail)(scope, receive, send_with_headers)
            return
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            if "form" in scope["state"]:
                await request.close()

    async def _check(self, request: Request, headers: Headers, browser: Browser | None) -> None:
        """Raises HTTPException for a request that is refused."""
        # An attacker can make a name of their own resolve to this address (DNS rebinding).
        if [host.lower() for host in headers.getlist("host")][:2] not in [[host] for host in self._hosts]:
            raise HTTPException(421, "The console has another name. Open it by the address that it printed.")
        path = request.url.path
        if browser is None and path != SIGN_IN_PATH and not path.startswith(STATIC_PATH):
            raise HTTPException(401, "You are not signed in.")
        # Browsers also send the cookie for pages at other ports and other hosts of the domain, maybe of a sandbox.
        if headers.get("sec-fetch-site") in ("same-site", "cross-site") and headers.get("sec-fetch-mode") != "navigate":
            raise HTTPException(403, _FOREIGN)
        if request.method in ("GET", "HEAD"):
            return
        if browser is None or headers.get("origin", f"{request.url.scheme}://{headers['host']}").lower() not in {
            f"{scheme}://{headers['host'].lower()}" for scheme in ("http", "https")
        }:
            raise HTTPException(403, _FOREIGN)
        try:
            form = await request.form(max_files=1, max_fields=FORM_FIELDS_MAX, max_part_size=FORM_BYTES_MAX)
        except MultiPartException as error:
            raise HTTPException(400, f"The form can't be read: {error.message}") from error
        request.state.form = form
        sent = headers.get(CSRF_HEADER) or form.get(CSRF_FIELD)
        if not isinstance(sent, str) or not hmac.compare_digest(_key(sent), _key(browser.csrf)):
            raise HTTPException(403, "The page is too old, or the request comes from another site. Load it again.")


def _bounded(headers: Headers, receive: Receive) -> Receive:
    left = UPLOAD_BYTES_MAX if headers.get("content-type", "").startswith("multipart/") else FORM_BYTES_MAX

    async def bounded() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise HTTPException(413, "The form is too large.")
        return message

    return bounded
