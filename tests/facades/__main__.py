"""Runs a command with a daemon and a gateway for it, as E2B's clients find them in production:

    python -m tests.facades [--form domain|urls] COMMAND...

With `domain` the command gets E2B_API_KEY and E2B_DOMAIN: a name server answers for the domain, and the gateway has a wildcard
certificate for it, on port 443. With `urls` it gets the gateway's address in E2B_API_URL and E2B_SANDBOX_URL. In both cases
it runs in a network namespace of its own, so no client reaches anything else. No client is patched.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import dns.message
import dns.rcode
import dns.rrset

from tests.support.certificates import Authority
from tests.support.daemon import daemon_of
from tests.support.gateway import running_gateway

ROOT = Path(__file__).parents[2]
DOMAIN = "boxes.example"
# verifiers makes a template of each image, under a name that it computes from the image and its size.
VERIFIERS_TEMPLATE = "vf-0b8d428bf0aac599a412420e"
TEMPLATES = ("base", "code-interpreter-v1", VERIFIERS_TEMPLATE)
# The command's own mount and network namespace. A user who is not root is root in it.
NAMESPACES = ("unshare", "--net", "--mount", *(("--map-root-user",) if os.geteuid() else ()))
PREPARE = 'ip link set lo up && mount --bind "$0" /etc/resolv.conf && exec "$@"'


class Names(socketserver.BaseRequestHandler):
    """Answers for the domain and every name below it with this machine's address; others do not exist."""

    def handle(self) -> None:
        data, socket = self.request
        answer = dns.message.make_response(dns.message.from_wire(data))
        name = answer.question[0].name
        if not name.is_subdomain(dns.name.from_text(DOMAIN)):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif answer.question[0].rdtype == dns.rdatatype.A:
            answer.answer.append(dns.rrset.from_text(name, 60, "IN", "A", "127.0.0.1"))
        socket.sendto(answer.to_wire(), self.client_address)


@contextlib.contextmanager
def names() -> Iterator[None]:
    with socketserver.UDPServer(("127.0.0.1", 53), Names) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def inside(form: str, command: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="facades-") as path, contextlib.ExitStack() as stack:
        options, client = form_of(form, Path(path))
        stack.enter_context(names())
        daemon = stack.enter_context(daemon_of("", "--backend", "local"))
        config = 'gateway.users = ["root"]\n[gateway.templates]\n' + "".join(
            f'"{name}" = "base"\n' for name in TEMPLATES
        )
        gateway = stack.enter_context(running_gateway(daemon, *options, config=config))
        client |= {"E2B_API_KEY": gateway.token, "VERIFIERS_TEMPLATE": VERIFIERS_TEMPLATE, "HOME": path}
        code = subprocess.run(command, env={**os.environ, **client}).returncode
        if code:
            sys.stderr.write(gateway.log.read_text())
        with daemon.client_of("one") as owner:
            left = owner.list_sessions()
        assert code or not left, f"the client left sandboxes behind: {left}"
        return code


def form_of(form: str, directory: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """The options of the gateway, and the environment with which a client uses it."""
    if form == "urls":
        return ("--listen", "127.0.0.1:3000"), dict.fromkeys(
            ("E2B_API_URL", "E2B_SANDBOX_URL"), "http://127.0.0.1:3000"
        )
    authority = Authority(directory)
    pair = authority.site("wildcard", DOMAIN, f"*.{DOMAIN}")
    options = (
        "--listen",
        "127.0.0.1:443",
        "--domain",
        DOMAIN,
        "--tls-cert",
        str(pair.cert),
        "--tls-key",
        str(pair.key),
    )
    trust = dict.fromkeys(("SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"), str(authority.cert))
    return options, {"E2B_DOMAIN": DOMAIN, **trust}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.facades", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--form", choices=("domain", "urls"), default="domain")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.inside:
        sys.exit(inside(arguments.form, arguments.command))
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as resolver:
        resolver.write("nameserver 127.0.0.1\n")
        resolver.flush()
        again = (sys.executable, "-m", "tests.facades", "--form", arguments.form, "--inside", *arguments.command)
        sys.exit(subprocess.run((*NAMESPACES, "sh", "-c", PREPARE, resolver.name, *again)).returncode)


if __name__ == "__main__":
    main()
