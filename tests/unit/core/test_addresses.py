"""The daemon listens at its configured addresses, and at none that would expose it or another daemon."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from executor_server.core.addresses import (
    AddressError,
    TcpAddress,
    UnixAddress,
    check_exposure,
    clear_stale_socket,
    parse,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:50051", TcpAddress("127.0.0.1", 50051)),
        ("[::1]:0", TcpAddress("::1", 0)),
        ("unix:/run/x.sock", UnixAddress(Path("/run/x.sock"))),
    ],
)
def test_an_address_reads_back_as_it_was_written(text: str, address: object) -> None:
    assert parse(text) == address
    assert str(parse(text)) == text


def test_a_socket_whose_path_is_not_utf_8_is_refused() -> None:
    """gRPC takes no other, and the daemon ended with a traceback."""
    with pytest.raises(AddressError, match="is not UTF-8 text"):
        parse("unix:/run/x\udcff")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "50051",
        ":50051",
        "host:",
        "host:65536",
        "unix:x.sock",
        "unix:/a/../b",
        "unix-abstract:x",
        "dns:///h:1",
        "unix:/" + "x" * 107,
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError):
        parse(text)


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "192.168.1.5:1", "example.org:1", "127.0.0.1.example.org:1"])
def test_other_machines_are_served_over_tls_only(text: str) -> None:
    with pytest.raises(AddressError, match="other machines"):
        check_exposure(parse(text), has_tls=False)
    check_exposure(parse(text), has_tls=True)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "127.8.0.1:1", "[::1]:1", "localhost:1", "unix:/x"])
def test_this_machine_is_served_without_tls(text: str) -> None:
    check_exposure(parse(text), has_tls=False)


def test_a_dead_daemons_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    clear_stale_socket(UnixAddress(path))
    assert not path.exists()
    clear_stale_socket(UnixAddress(path))


def test_a_missing_directory_of_a_socket_is_named(tmp_path: Path) -> None:
    """The daemon said "it is in use, or not an address of this machine", below a line of gRPC's log."""
    with pytest.raises(AddressError, match=f"there is no directory {tmp_path}/missing"):
        clear_stale_socket(UnixAddress(tmp_path / "missing" / "s"))


def test_a_live_daemons_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen()
        with pytest.raises(AddressError, match="another process listens there"):
            clear_stale_socket(UnixAddress(path))
    assert path.exists()


def test_a_file_in_the_place_of_a_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(AddressError, match="not a socket"):
        clear_stale_socket(UnixAddress(tmp_path / "s"))
    assert (tmp_path / "s").read_text() == "precious"
