"""A web site outside of the sandboxes, for examples of agents with a network: on this host, with a name of its own.

The name is made up, so it comes with a name server that knows it and nothing else. `Site.configuration` names both to
the daemon, and the one address that the name may lead to.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dns.exception
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import psutil

NAME = "kiln-and-clay.example"


class NoAddress(Exception):
    """This host has no address but its loopback, to which the egress proxy never connects."""


@dataclass(frozen=True)
class Site:
    """The site while it is served."""

    name: str
    address: str
    port: int
    name_server_port: int

    @property
    def url(self) -> str:
        return f"http://{self.name}:{self.port}"

    @property
    def host(self) -> str:
        """The site as policies name it."""
        return f"{self.name}:{self.port}"

    @property
    def configuration(self) -> str:
        """The section of executor.toml for a daemon that finds the site."""
        resolver = f"127.0.0.1:{self.name_server_port}"
        return f"[egress]\nresolver = {json.dumps(resolver)}\ninternal = {json.dumps([self.address + '/32'])}\n"


@contextlib.contextmanager
def served(pages: Mapping[str, str]) -> Iterator[Site]:
    """Serves pages by path until the end of the block. Raises NoAddress."""
    address = _own_address()
    site = http.server.ThreadingHTTPServer((address, 0), functools.partial(_Pages, pages))
    names = socketserver.UDPServer(("127.0.0.1", 0), functools.partial(_Names, address))
    with site, names:
        threads = [threading.Thread(target=server.serve_forever) for server in (site, names)]
        for thread in threads:
            thread.start()
        try:
            yield Site(NAME, address, site.server_port, names.server_address[1])
        finally:
            for server, thread in zip((site, names), threads, strict=True):
                server.shutdown()
                thread.join()


def _own_address() -> str:
    """An IPv4 address of this host that other machines or containers could have."""
    states = psutil.net_if_stats()
    for interface, addresses in psutil.net_if_addrs().items():
        flags = states[interface].flags.split(",") if interface in states else ["loopback"]
        for each in addresses:
            if each.family == socket.AF_INET and "loopback" not in flags:
                return each.address
    raise NoAddress("this host has no IPv4 address but its loopback, and the egress proxy never connects to that")


class _Pages(http.server.BaseHTTPRequestHandler):
    def __init__(self, pages: Mapping[str, str], *args: Any) -> None:
        self._pages = pages
        super().__init__(*args)

    def do_GET(self) -> None:
        page = self._pages.get(self.path)
        body = (page if page is not None else "There is no such page.\n").encode()
        self.send_response(404 if page is None else 200)
        kind = "application/json" if self.path.endswith(".json") else "text/html"
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


class _Names(socketserver.BaseRequestHandler):
    """Answers one question over UDP."""

    def __init__(self, address: str, *args: Any) -> None:
        self._address = address
        super().__init__(*args)

    def handle(self) -> None:
        data, sock = self.request
        try:
            asked = dns.message.from_wire(data)
            (question,) = asked.question
        except (dns.exception.DNSException, ValueError):
            return
        answer = dns.message.make_response(asked)
        if question.name.to_text(omit_final_dot=True).lower() != NAME:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif question.rdtype == dns.rdatatype.A:
            answer.answer.append(dns.rrset.from_text(question.name, 60, "IN", "A", self._address))
        sock.sendto(answer.to_wire(), self.client_address)
