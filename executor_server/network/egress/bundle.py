"""The certificate authorities that sandboxes with a network trust: the system's, those of `ca_file`, and the proxy's.

A separate process creates the proxy's authority at first use, so that its key is never in the daemon's memory.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from executor_server.network.egress.interface import EgressError

CERTIFICATE_NAME = "authority.pem"
_KEY_NAME = "authority.key"
# A line between certificates, which readers of PEM files ignore. Chromium has the system's authorities built in, and
# gets those after this line (images/browser/trust-authorities).
OWN_MARK = b"# Authorities of this daemon: those of egress.ca_file, and the egress proxy's own."
_MAX_FILE_BYTES = 2**23
_HASH_CHARS = 16
_MAKE_S = 30.0
# When an authority with less time than this is replaced; proxy/authority.py decides by the same.
_REMAKE_BEFORE_END_S = 60 * 86_400
# The next daemon creates a new bundle if the system's authorities have changed; sandboxes may have older ones mounted.
_KEPT_BUNDLES = 8


def build_bundle(directory: Path, ca_file: Path | None) -> Path:
    """Returns the bundle's path; its name is a hash of the content. Blocks. Raises EgressError."""
    own = ensure_certificate(directory)
    parts = [*(_read(path) for path in _system_files()), OWN_MARK]
    if ca_file is not None:
        extra = _read(ca_file)
        _check_certificates(extra, ca_file)
        parts.append(extra)
    content = b"\n".join(part.strip() for part in (*parts, own)) + b"\n"
    bundles = directory / "bundles"
    path = bundles / f"ca-{hashlib.sha256(content).hexdigest()[:_HASH_CHARS]}.pem"
    try:
        bundles.mkdir(mode=0o755, exist_ok=True)
        if not path.exists():
            _write(path, content)
            _remove_old(bundles)
    except OSError as error:
        raise EgressError(f"The bundle of authorities can't be written to {bundles}: {error.strerror}.") from error
    return path


def ensure_certificate(directory: Path) -> bytes:
    """Returns the authority's certificate; creates the authority at first use, and if it is about to expire.

    Raises EgressError.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EgressError(f"The directory {directory} can't be made: {error.strerror}.") from error
    command = [sys.executable, "-P", "-m", "executor_server.network.proxy", "authority", str(directory)]
    path = directory / CERTIFICATE_NAME
    if not _is_whole(directory):
        try:
            made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_MAKE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise EgressError(
                f"The proxy's certificate authority can't be created within {_MAKE_S:g} seconds."
            ) from error
        except OSError as error:
            raise EgressError(f"The proxy's certificate authority can't be created: {error.strerror}.") from error
        if made.returncode != 0:
            lines = made.stderr.decode("utf-8", "replace").strip().splitlines() or ["it gave no reason"]
            raise EgressError(f"The proxy's certificate authority can't be created: {lines[-1][:300]}")
    return _read(path)


def _is_whole(directory: Path) -> bool:
    """True if the authority has key and certificate, and does not expire soon."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(directory / CERTIFICATE_NAME)
    except OSError:  # SSLError included: the process that creates authorities says what is wrong
        return False
    ends_s = [ssl.cert_time_to_seconds(str(each["notAfter"])) for each in context.get_ca_certs()]
    lasts = min(ends_s, default=0) - time.time() > _REMAKE_BEFORE_END_S
    return lasts and (directory / _KEY_NAME).exists()


def _system_files() -> Iterator[Path]:
    """Yields the file of the system's authorities, if any: the one that OpenSSL reads, or a usual one."""
    for name in (
        ssl.get_default_verify_paths().cafile or "",
        "/etc/ssl/certs/ca-certificates.crt",
        "/etc/pki/tls/certs/ca-bundle.crt",
        "/etc/ssl/cert.pem",
    ):
        if name and Path(name).is_file():
            yield Path(name)
            return


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise EgressError(f"The certificates in {path} can't be read: {error.strerror}.") from error
    if len(data) > _MAX_FILE_BYTES:
        raise EgressError(f"The certificates in {path} are larger than {_MAX_FILE_BYTES:,} bytes.")
    return data


def _check_certificates(data: bytes, path: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii"))
    except (ValueError, ssl.SSLError) as error:
        raise EgressError(f"The file {path} of egress.ca_file holds no certificates in PEM form.") from error


def _write(path: Path, content: bytes) -> None:
    fd, name = tempfile.mkstemp(prefix=".ca-", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            os.fchmod(fd, 0o644)  # for the users of sandboxes, who are in no list of users
        Path(name).rename(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _remove_old(bundles: Path) -> None:
    files = sorted(bundles.glob("ca-*.pem"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[_KEPT_BUNDLES:]:
        path.unlink(missing_ok=True)
