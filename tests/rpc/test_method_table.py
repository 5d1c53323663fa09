"""Methods are looked up; only the few that must not wait behind others have a task of their own in grpc.aio."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health

from executor_server.api.handlers import OWN_METHODS, Handler, MethodTable, Wrapper
from executor_server.api.server import BY_THEMSELVES
from tests.rpc.edge import FakeSessions, make_server, settings
from tests.support.fleet_daemon import wanted

# The server's own tasks besides (its loop, the watcher of tokens, this test), and some to spare.
_OTHER_TASKS = 6


class Server:
    """A server that records the handlers that it is given."""

    def __init__(self) -> None:
        self.registered: dict[str, Any] = {}
        self.generic: list[Any] = []

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.registered.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        self.generic += handlers


def handler() -> Any:
    return grpc.unary_unary_rpc_method_handler(lambda _request, _context: None)


def looked_up(server: Server, method: str) -> Any:
    (generic,) = server.generic
    details: Any = type("Details", (), {"method": method})()
    return generic.service(details)


def test_every_method_is_looked_up_and_a_chosen_one_is_registered_too() -> None:
    table, server, first, second = MethodTable({"/s/First"}), Server(), handler(), handler()
    table.add_registered_method_handlers("s", {"First": first, "Second": second})
    table.serve_by(server)  # type: ignore[arg-type]  # it is used as one
    assert server.registered == {"/s/First": first}
    assert [looked_up(server, method) for method in ("/s/First", "/s/Second")] == [first, second]


def test_wrappers_are_put_around_each_method_and_around_unknown_ones_the_first_outermost() -> None:
    made = []

    def wrapper(name: str) -> Wrapper:
        def wrap(method: str, wrapped: Handler) -> Handler:
            made.append((name, method))
            return wrapped

        return wrap

    table, server = MethodTable(frozenset(), (wrapper("outer"), wrapper("inner"))), Server()
    table.add_registered_method_handlers("s", {"First": handler()})
    table.serve_by(server)  # type: ignore[arg-type]  # it is used as one
    looked_up(server, "/s/First")
    looked_up(server, "/s/Unknown")
    assert made == [(name, method) for method in ("/s/First", "/s/Unknown") for name in ("inner", "outer")]


def test_the_last_that_has_a_method_serves_it() -> None:
    table, server, last = MethodTable({"/s/First"}), Server(), handler()
    table.add_registered_method_handlers("s", {"First": handler()})
    table.add_registered_method_handlers("s", {"First": last})
    table.serve_by(server)  # type: ignore[arg-type]  # it is used as one
    assert server.registered == {"/s/First": last}


def test_the_methods_that_go_their_own_way_exist() -> None:
    assert OWN_METHODS | {f"/{health.SERVICE_NAME}/Check"} >= BY_THEMSELVES


@pytest.mark.skipif(wanted(), reason="a front has tasks besides")
async def test_a_server_keeps_no_task_for_each_of_its_methods(tmp_path: Path) -> None:
    server = make_server(FakeSessions(), settings(f"unix:{tmp_path}/s"))
    await server.start()
    try:
        assert len(asyncio.all_tasks()) <= len(BY_THEMSELVES) + _OTHER_TASKS
    finally:
        await server.stop(0)
