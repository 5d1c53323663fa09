"""A fleet that a test may hurt: a front and nodes as processes, and cables to each node that can be unplugged.

Each node is reached through its front's cable to `fleet.listen` only. A fleet that is measured has none. The sandboxes of a node outlive it when it is killed; one more start at the end cleans
up after it.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import executor_service_pb2_grpc as service_grpc
from executor_api.v1 import types_pb2 as pb
from executor_client import ExecutorClient
from executor_server.fleet.membership.certificates import issue_front, issue_node
from tests.support.cable import Cable
from tests.support.fork_server import SERVER, popen, server
from tests.support.free_ports import free_port
from tests.support.machine_network import Network, Place
from tests.support.polling import eventually

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 5.0
QUIET = "[pool]\nsize = 0\n"


@dataclass
class Machine:
    """A daemon on a directory of its own: a front, or a node. `prefix` begins the command that starts it."""

    name: str
    directory: Path
    command: str
    process: subprocess.Popen[bytes] | None = None
    prefix: Sequence[str] = ()
    _earlier_chars: int = 0  # of the log, by earlier processes

    @property
    def state_dir(self) -> Path:
        return self.directory / "s"

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    @property
    def address(self) -> str:
        return f"unix:{self.state_dir / 'executor.sock'}"

    def start(self) -> None:
        """Begins; returns before it listens."""
        command = [*self.prefix, *SERVER, self.command, "--config", str(self.directory / "c.toml")]
        with (self.directory / "log").open("ab") as output:
            self._earlier_chars = len(self.log)
            self.process = popen(command, stdout=output, stderr=subprocess.STDOUT)

    def await_start(self) -> None:
        """Waits until it listens or has ended: a signal that comes earlier ends it before it can clean up."""
        eventually(
            lambda: "executor-server listens on" in self.log[self._earlier_chars :] or not self.is_running,
            timeout_s=START_TIMEOUT_S,
        )

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def stop(self) -> int:
        """Asks it to stop, twice if it takes its time; returns its exit code."""
        assert self.process is not None
        process, self.process = self.process, None
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(STOP_TIMEOUT_S / 10)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"{self.name} did not stop:\n{self.log[-8000:]}") from None


@dataclass
class NodeMachine(Machine):
    """A node, and its front's cable to it."""

    link_address: str = ""
    cable: Cable | Place | None = None

    def unplug(self) -> None:
        """Cuts its network: the front does not reach it."""
        assert self.cable is not None
        self.cable.unplug()

    def plug_in(self) -> None:
        if self.cable is not None:
            self.cable.plug_in()


class Fleet:
    """A front and its nodes, which run until the end of the stack unless a test ends them."""

    def __init__(
        self,
        directory: Path,
        stack: ExitStack,
        *,
        front_config: str = "",
        node_config: str = QUIET,
        policy: str = "",
        has_cables: bool = True,
        network: Network | None = None,
    ) -> None:
        """`policy`: the text of the front's policy file. With a `network`, each node has a place of its own in it, in
        place of cables on the loopback interface."""
        self._network = network
        self.directory = directory
        self._stack = stack
        self._node_config = node_config
        self._front_config = front_config
        if policy:
            (directory / "policy.toml").write_text(policy)
            self._front_config = f'[policy]\nfile = "{directory / "policy.toml"}"\n{front_config}'
        self._has_cables = has_cables
        issue_front(directory / "ca")
        self.nodes: dict[str, NodeMachine] = {}
        self.others: list[str] = []
        """Addresses of further nodes."""
        self.front = Machine("front", directory / "f", "front")
        self.front.state_dir.mkdir(parents=True, mode=0o700)

    def add(self, *names: str, config: str = "") -> None:
        """Makes nodes, which do not run yet."""
        for name in names:
            folder = issue_node(self.directory / "ca", name).folder
            directory = self.directory / name
            (directory / "s").mkdir(parents=True, mode=0o700)
            place = self._network.place() if self._network is not None else None
            port = free_port()
            listen = f"{place.host if place is not None else '127.0.0.1'}:{port}"
            cable: Cable | Place | None = place
            link_address = listen
            if self._has_cables and place is None:
                cable = self._stack.enter_context(Cable(("127.0.0.1", port)))
                link_address = cable.address
            (directory / "c.toml").write_text(
                f'[server]\nstate_dir = "{directory / "s"}"\n'
                f'[fleet]\nrole = "node"\ncertificates = "{folder}"\nlisten = "{listen}"\n'
                f'labels = {{ name = "{name}" }}\n{self._node_config}{config}'
            )
            prefix = place.command if place is not None else ()
            self.nodes[name] = NodeMachine(
                name, directory, "serve", prefix=prefix, link_address=link_address, cable=cable
            )

    def start(self) -> None:
        """Starts the front and all nodes that do not run, and waits until all serve."""
        self.write_front_config()
        for machine in (self.front, *self.nodes.values()):
            if machine.process is None:
                machine.start()
        self.wait_serving(*self.nodes)

    def write_front_config(self, **fleet: object) -> None:
        addresses = [*(node.link_address for node in self.nodes.values()), *self.others]
        nodes = ", ".join(f'"{address}"' for address in addresses)
        (self.front.directory / "c.toml").write_text(
            f'[server]\nstate_dir = "{self.front.state_dir}"\nlisten = ["unix:{self.front.state_dir}/executor.sock"]\n'
            f'[fleet]\nrole = "front"\ncertificates = "{self.directory / "ca" / "front"}"\nnodes = [{nodes}]\n'
            + "".join(f"{key} = {_toml(value)}\n" for key, value in fleet.items())
            + self._front_config
        )

    def wait_serving(self, *names: str) -> None:
        def all_serve() -> bool:
            states = self.states()
            return all(states.get(name) == "SERVING" for name in names)

        assert eventually(all_serve, timeout_s=START_TIMEOUT_S), f"{self.states()}\n{self.logs()}"

    def states(self) -> Mapping[str, str]:
        """The state of each node, as the front sees it; empty while the front is away."""
        return {each.node: admin_pb.NodeState.Name(each.state).removeprefix("NODE_STATE_") for each in self.seen()}

    def seen(self, front: Machine | None = None) -> list[admin_pb.FleetNode]:
        """The nodes as the front sees them, or as another one does that has the same token."""
        try:
            with self._channel(front) as channel:
                answer = admin_grpc.AdminServiceStub(channel).GetFleet(
                    admin_pb.GetFleetRequest(), timeout=CALL_TIMEOUT_S, metadata=self._metadata
                )
        except (grpc.RpcError, FileNotFoundError):
            return []
        return list(answer.nodes)

    def reload(self) -> None:
        """Has the front read its policy and its tokens again."""
        with self._channel() as channel:
            stub = admin_grpc.AdminServiceStub(channel)
            stub.Reload(admin_pb.ReloadRequest(), timeout=START_TIMEOUT_S, metadata=self._metadata)

    def usage(self, tenant: str) -> admin_pb.TenantUsage:
        """Returns what the front knows that a tenant has used."""
        with self._channel() as channel:
            answer = admin_grpc.AdminServiceStub(channel).GetUsage(
                admin_pb.GetUsageRequest(), timeout=CALL_TIMEOUT_S, metadata=self._metadata
            )
        return next((each for each in answer.tenants if each.tenant == tenant), admin_pb.TenantUsage())

    def create(self, request_id: str, node: str = "", *, token: str = "") -> pb.Session | None:
        """Asks the front once for a session; None while it can't answer."""
        metadata = (("authorization", f"Bearer {token or self.token}"),)
        labels = {"name": node} if node else {}
        request = service_pb.CreateSessionRequest(request_id=request_id, node_labels=labels)
        try:
            with self._channel() as channel:
                stub = service_grpc.ExecutorServiceStub(channel)
                made = stub.CreateSession(request, timeout=START_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return None
        return cast("pb.Session", made.session)

    @property
    def token(self) -> str:
        return (self.front.state_dir / "token").read_text().strip()

    def client(self, **options: Any) -> ExecutorClient:
        return ExecutorClient(self.front.address, token=self.token, **options)

    def client_with(self, token: str) -> ExecutorClient:
        return ExecutorClient(self.front.address, token=token)

    def command(self, *arguments: str) -> str:
        """Runs a command of `executor-server` against the front. Returns what it prints."""
        access = ["--address", self.front.address, "--state-dir", str(self.front.state_dir)]
        done = server(*arguments, *access, COLUMNS="80")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def logs(self) -> str:
        return "\n".join(
            f"== {machine.name}\n{machine.log[-3000:]}"
            for machine in (self.front, *self.nodes.values())
            if (machine.directory / "log").exists()
        )

    def close(self) -> None:
        """Stops all in order. What was killed starts once more, since its sandboxes may be alive."""
        for node in self.nodes.values():
            node.plug_in()
            if node.process is None and (node.state_dir / "registry.db").exists():
                node.start()
        running = [machine for machine in (*self.nodes.values(), self.front) if machine.process is not None]
        for machine in running:
            machine.send(signal.SIGCONT)
            machine.await_start()
        problems = []
        for machine in running:
            if (code := machine.stop()) != 0:
                problems.append(f"{machine.name} ended with {code}:\n{machine.log[-4000:]}")
        assert not problems, "\n".join(problems)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)

    def _channel(self, front: Machine | None = None) -> grpc.Channel:
        address = (front or self.front).address
        return grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


@contextmanager
def fleet(directory: Path, *names: str, **options: Any) -> Iterator[Fleet]:
    """A fleet of nodes with these names, all of them serving."""
    with ExitStack() as stack:
        made = Fleet(directory, stack, **options)
        stack.callback(made.close)
        made.add(*names)
        made.start()
        yield made


@contextmanager
def fleet_without_cables(*names: str, **options: Any) -> Iterator[Fleet]:
    """The same on a directory that goes with it, with nodes that are not to be cut off."""
    directory = Path(tempfile.mkdtemp(prefix="d-"))
    with fleet(directory, *names, has_cables=False, **options) as made:
        yield made
    shutil.rmtree(directory)


def new_id() -> str:
    return secrets.token_hex(16)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float)) else f'"{value}"'
