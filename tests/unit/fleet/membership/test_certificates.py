"""The certificates of a fleet name its members, and are not taken for anybody else's."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509

from executor_server.daemon.cli import main
from executor_server.daemon.cli.shared import EXIT_PLACE
from executor_server.fleet.membership.certificates import (
    AUTHORITY_KEY_NAME,
    AUTHORITY_NAME,
    CERTIFICATE_NAME,
    FRONT,
    KEY_NAME,
    CertificateError,
    Member,
    issue_front,
    issue_node,
    member_in,
    member_of,
    read_credentials,
)
from tests.support.certificates import Authority


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    issue_front(tmp_path / "fleet")
    return tmp_path / "fleet"


def run(*arguments: str) -> Result:
    return CliRunner(catch_exceptions=False).invoke(main, ["fleet", *arguments])


def shaken_hands(client_folder: Path, server_folder: Path) -> bool:
    """True when a client with one member's files and a server with another's accept each other's certificates."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    for context, folder in ((server, server_folder), (client, client_folder)):
        context.load_cert_chain(folder / CERTIFICATE_NAME, folder / KEY_NAME)
        context.load_verify_locations(folder / AUTHORITY_NAME)
        context.verify_mode = ssl.CERT_REQUIRED
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(6):
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return not ends


def test_a_front_and_a_node_of_one_fleet_accept_each_other(fleet: Path) -> None:
    node = issue_node(fleet, "n1")
    assert shaken_hands(fleet / "front", node.folder)


def test_a_front_of_another_fleet_is_not_accepted(fleet: Path, tmp_path: Path) -> None:
    node = issue_node(fleet, "n1")
    other = issue_front(tmp_path / "other")
    assert not shaken_hands(other.folder, node.folder)


def test_a_nodes_certificate_is_not_accepted_as_a_fronts(fleet: Path) -> None:
    first, second = issue_node(fleet, "n1"), issue_node(fleet, "n2")
    assert not shaken_hands(first.folder, second.folder)


def test_a_fronts_certificate_is_not_accepted_as_a_nodes(fleet: Path) -> None:
    assert not shaken_hands(fleet / "front", fleet / "front")


def test_a_folder_is_read_as_what_its_certificate_names(fleet: Path) -> None:
    node = issue_node(fleet, "n-1")
    assert read_credentials(fleet / "front", "front").member == FRONT
    assert read_credentials(node.folder, "node").member == Member("node", "n-1")
    assert Member("node", "n-1").name == "n-1.node.fleet.internal"


@pytest.mark.parametrize(("role", "other"), [("front", "node"), ("node", "front")])
def test_a_folder_of_another_role_is_refused(fleet: Path, role: str, other: str) -> None:
    folder = fleet / "front" if role == "front" else issue_node(fleet, "n1").folder
    with pytest.raises(CertificateError, match=f"a certificate of a {other} is needed"):
        read_credentials(folder, "node" if other == "node" else "front")


def test_keys_are_for_their_user_alone(fleet: Path) -> None:
    folder = issue_node(fleet, "n1").folder
    for path in (fleet / AUTHORITY_KEY_NAME, folder / KEY_NAME, fleet / "front" / KEY_NAME):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(fleet.stat().st_mode) == stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_key_that_others_can_read_is_refused(fleet: Path) -> None:
    (fleet / "front" / KEY_NAME).chmod(0o640)
    with pytest.raises(CertificateError, match="chmod 600"):
        read_credentials(fleet / "front", "front")


def test_initializing_again_keeps_the_authority_and_renews_the_front(fleet: Path) -> None:
    files = {path: path.read_bytes() for path in fleet.rglob("*") if path.is_file()}
    issue_front(fleet, days=500)
    changed = {path.relative_to(fleet) for path, content in files.items() if path.read_bytes() != content}
    assert changed == {Path("front") / CERTIFICATE_NAME}
    left = read_credentials(fleet / "front", "front").expire_time - datetime.now(UTC)
    assert timedelta(days=499) < left <= timedelta(days=500)


def test_a_certificate_ends_with_its_authority(fleet: Path) -> None:
    node = issue_node(fleet, "n1", days=3650)
    authority = x509.load_pem_x509_certificate((fleet / AUTHORITY_NAME).read_bytes())
    assert node.expire_time == authority.not_valid_after_utc


def test_an_authority_without_its_key_is_not_replaced(fleet: Path) -> None:
    (fleet / AUTHORITY_KEY_NAME).unlink()
    before = (fleet / AUTHORITY_NAME).read_bytes()
    with pytest.raises(CertificateError, match="without its key"):
        issue_front(fleet)
    assert (fleet / AUTHORITY_NAME).read_bytes() == before


def test_a_node_needs_an_authority(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="fleet init"):
        issue_node(tmp_path / "none", "n1")


@pytest.mark.parametrize("name", ["", "-a", "A", "..", "x" * 25])
def test_a_name_that_no_node_can_have_is_refused(fleet: Path, name: str) -> None:
    with pytest.raises(CertificateError, match="can't be called"):
        issue_node(fleet, name)


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["front.fleet.internal", "n1.node.fleet.internal"],
        ["n1.node.fleet.internal", "n2.node.fleet.internal"],
        ["node.fleet.internal"],
        [".node.fleet.internal"],
        ["a.b.node.fleet.internal"],
        ["*.node.fleet.internal"],
        ["x.front.fleet.internal"],
        ["N1.node.fleet.internal"],
    ],
)
def test_other_names_are_those_of_no_member(names: list[str]) -> None:
    assert member_of(names) is None


def test_a_certificate_without_the_use_of_its_role_names_no_member(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.site("leaf", "front.fleet.internal")
    assert member_in(x509.load_pem_x509_certificate(pair.cert.read_bytes())) is None


def test_an_expired_certificate_is_refused_with_its_time(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + timedelta(days=400)

    monkeypatch.setattr("executor_server.fleet.membership.certificates.datetime.datetime", Later)
    with pytest.raises(CertificateError, match="renew it with"):
        read_credentials(fleet / "front", "front")


def test_a_key_of_another_certificate_is_refused(fleet: Path) -> None:
    other = issue_node(fleet, "n1").folder
    (fleet / "front" / KEY_NAME).write_bytes((other / KEY_NAME).read_bytes())
    with pytest.raises(CertificateError, match="belongs to another certificate"):
        read_credentials(fleet / "front", "front")


def test_a_certificate_of_another_authority_is_refused(fleet: Path, tmp_path: Path) -> None:
    issue_front(tmp_path / "other")
    (fleet / "front" / AUTHORITY_NAME).write_bytes((tmp_path / "other" / AUTHORITY_NAME).read_bytes())
    with pytest.raises(CertificateError, match="is not signed by the CA"):
        read_credentials(fleet / "front", "front")


@pytest.mark.parametrize("name", [CERTIFICATE_NAME, AUTHORITY_NAME, KEY_NAME])
def test_a_folder_that_is_not_whole_is_refused(fleet: Path, name: str) -> None:
    (fleet / "front" / name).write_bytes(b"nothing")
    with pytest.raises(CertificateError, match=name):
        read_credentials(fleet / "front", "front")
    (fleet / "front" / name).unlink()
    with pytest.raises(CertificateError, match=name):
        read_credentials(fleet / "front", "front")


def test_the_key_is_not_shown_with_the_credentials(fleet: Path) -> None:
    assert "PRIVATE" not in repr(read_credentials(fleet / "front", "front"))


def test_the_commands_make_folders_and_show_when_they_expire(tmp_path: Path) -> None:
    directory = tmp_path / "fleet"
    made = run("init", str(directory), "--days", "30")
    added = run("add", str(directory), "n1", "n2")
    assert made.exit_code == added.exit_code == 0
    assert "the certificate of the front, valid until" in made.output
    assert "(30 days)" in made.output
    assert [f"the node {name}, valid until" in added.output for name in ("n1", "n2")] == [True, True]
    assert "(365 days)" in added.output


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    result = run("add", str(tmp_path / "fleet"), "n1")
    assert result.exit_code == EXIT_PLACE
    assert "executor-server fleet init" in result.output
