"""The first import in a build sandbox that misbehaves: it costs bytecode, and never the environment."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from executor_server.backends import BuildMounts
from executor_server.core import SandboxSpec
from executor_server.guest.wire.frames import Kind
from executor_server.packages import build_sandbox
from executor_server.packages.build_sandbox import Order
from executor_server.packages.uv_sandboxes import build_spec
from executor_server.packages.warm_up import warm_up
from tests.support.fake_backend import FakeBackend, FakeSandbox
from tests.support.fake_guest import FakeGuest


class Maker(FakeBackend):
    async def create_build_sandbox(self, spec: SandboxSpec, mounts: BuildMounts) -> FakeSandbox:
        return await self.create(spec)


@pytest.fixture
async def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Maker]:
    monkeypatch.setattr(build_sandbox, "_ANSWER_TIME_S", 0.05)
    maker = Maker(tmp_path)
    yield maker
    await maker.close()


def silent_from_its_start(guest: FakeGuest) -> None:
    guest.on[Kind.CONFIGURE] = lambda _: None


def silent_about_its_file(guest: FakeGuest) -> None:
    guest.on[Kind.EXECUTE] = lambda frame: guest.end(frame.head.text("id"))
    guest.on[Kind.FILE_GET] = lambda _: None


@pytest.mark.parametrize("prepare", [silent_from_its_start, silent_about_its_file])
async def test_silent_guest_costs_the_bytecode_only(
    maker: Maker, tmp_path: Path, prepare: Callable[[FakeGuest], None]
) -> None:
    maker.prepare = prepare
    order = Order(maker, build_spec("base", egress=False), BuildMounts(environment=tmp_path))
    site = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        written = await warm_up(order, site, [], cache_tag="cpython-312", time_s=1.0, on_progress=lambda _: None)
    finally:
        os.close(site)
    assert written.files == 0
    assert maker.asked == 1 and not maker.living
