"""Names that clients give: of templates, and of the user."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2b import AuthenticationException, Sandbox, SandboxException, Template
from e2b_code_interpreter import Sandbox as Interpreter

from tests.support.daemon import Daemon
from tests.support.gateway import Gateway, running_gateway


@pytest.fixture(scope="module")
def gateway(daemon: Daemon) -> Iterator[Gateway]:
    with running_gateway(daemon, config='gateway.users = ["root"]\n') as running:
        yield running


def test_templates_that_clients_ask_for_by_default_need_no_configuration(e2b: Gateway) -> None:
    for client in (Sandbox, Interpreter):
        with client.create(timeout=60) as sandbox:
            assert sandbox.is_running()


def test_a_template_exists_if_a_sandbox_of_it_can_be_created(e2b: Gateway) -> None:
    names = ("base", "base:default", "code-interpreter-v1", "vf-none", "base:other")
    assert [Template.exists(name) for name in names] == [True, True, True, False, False]
    with Sandbox.create("base:default", timeout=60) as sandbox:
        assert sandbox.is_running()
    with pytest.raises(SandboxException, match="'vf-none' not found"):
        Sandbox.create("vf-none", timeout=60)


def test_a_further_name_of_the_user_gives_no_further_rights(e2b: Gateway) -> None:
    with Sandbox.create(timeout=60) as sandbox:
        own, other = (sandbox.commands.run("id -u", user=name).stdout for name in ("user", "root"))
        assert own == other != "0\n"
        sandbox.files.write("a", "text", user="root")
        assert sandbox.files.read("a") == "text"
        with pytest.raises(AuthenticationException, match='"admin" is not offered'):
            sandbox.commands.run("true", user="admin")
