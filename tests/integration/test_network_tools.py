"""Real programs and libraries inside sessions with a network: they work unchanged where they may, and where they may not
they end with the reason, in their own way and in the logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from executor_client import ExecutionResult, ExecutorClient, Session
from tests.support.internet.world import BAD_CERTIFICATES, HTTPS_PORT, SUFFIX, Internet
from tests.support.network import networked_daemon, networked_session, policy, skip_where_absent

DENIED = f"denied.{SUFFIX}"
OTHER = "elsewhere.example"
REFUSED = f"{OTHER}:{HTTPS_PORT} is not allowed for this session"

# Each defines fetch(url), which returns the text of the answer or raises with what the tool says.
FETCH = {
    "urllib": """
import urllib.request
def fetch(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()
""",
    "requests": """
import requests
def fetch(url):
    answer = requests.get(url, timeout=30)
    answer.raise_for_status()
    return answer.text
""",
    "httpx": """
import httpx
def fetch(url):
    return httpx.get(url, timeout=30).raise_for_status().text
""",
    "aiohttp": """
import aiohttp, asyncio
async def _fetch(url):
    async with aiohttp.ClientSession() as session, session.get(url, raise_for_status=True) as answer:
        return await answer.text()
def fetch(url):
    return asyncio.run(_fetch(url))
""",
    "curl": """
import shutil, subprocess
if shutil.which("curl") is None:
    raise ModuleNotFoundError(name="curl")
def fetch(url):
    command = ["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", "30", url]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"curl {done.returncode}: {done.stdout} {done.stderr}")
    return done.stdout
""",
}
SHOWS_THE_REASON = ("urllib", "requests", "httpx", "aiohttp")
"""They print the proxy's phrase when it refuses a tunnel; curl and git print the status alone."""


@pytest.fixture(scope="module", params=["local", "docker", "e2b"])
def client(request: pytest.FixtureRequest, internet: Internet) -> Iterator[ExecutorClient]:
    with networked_daemon(internet, request.param, policy(denied=[DENIED])) as daemon, daemon.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def session(client: ExecutorClient) -> Iterator[Session]:
    """A session that may reach every site but one; it is the tests' of this module together."""
    with networked_session(client, f"*.{SUFFIX}") as made:
        yield made


def run(session: Session, code: str) -> ExecutionResult:
    """Runs a program that must succeed; skips the test when it lacks a module or a tool."""
    result = session.execute(code)
    if result.error is not None and result.error.type == "ModuleNotFoundError":
        pytest.skip(f"the sandbox lacks what it takes: {result.error.message}")
    assert result.error is None, f"{result.error}\n{result.logs}"
    skip_where_absent(result.output)
    return result


def failure(session: Session, tool: str, url: str) -> ExecutionResult:
    """The output is the exception that the tool raised."""
    attempt = (
        f"try:\n    said = 'no failure: ' + fetch({url!r})\nexcept Exception as error:\n    said = repr(error)\nsaid"
    )
    return run(session, FETCH[tool] + attempt)


Logs = Callable[[ExecutionResult], str]


@pytest.fixture
def logs(request: pytest.FixtureRequest, session: Session) -> Logs:
    """The logs of a step; on E2B with those of another one, since a notice from there may be late by a step."""
    is_late = request.node.callspec.params["client"] == "e2b"
    return lambda found: found.logs + (session.execute("1").logs if is_late else "")


tools = pytest.mark.parametrize("tool", list(FETCH))


@tools
def test_an_allowed_page_is_fetched(session: Session, tool: str) -> None:
    for scheme in ("https", "http"):
        found = run(session, f"{FETCH[tool]}\nfetch('{scheme}://files.{SUFFIX}/hello.txt')")
        assert found.output == "hello from outside\n"
        assert (found.usage.network.connections, found.usage.network.denied) == (1, 0)


@tools
def test_a_refusal_is_an_error_of_the_tool_with_the_reason(session: Session, tool: str, logs: Logs) -> None:
    found = failure(session, tool, f"https://{OTHER}/")
    assert "403" in found.output
    assert REFUSED in logs(found)
    if tool in SHOWS_THE_REASON:
        assert "is not allowed for this session" in found.output
    assert (found.usage.network.connections, found.usage.network.denied > 0) == (0, True)


@tools
def test_over_plain_http_the_refusal_is_an_answer(session: Session, tool: str, logs: Logs) -> None:
    found = failure(session, tool, f"http://{OTHER}/")
    assert "403" in found.output
    assert f"{OTHER}:80 is not allowed for this session" in logs(found)


@tools
def test_names_that_do_not_exist_are_no_refusals(session: Session, tool: str, logs: Logs) -> None:
    missing = failure(session, tool, f"https://nowhere.{SUFFIX}/")
    assert "403" not in missing.output and f"nowhere.{SUFFIX}" in logs(missing)


@tools
def test_certificates_are_still_the_tools_to_verify(session: Session, tool: str) -> None:
    """The proxy copies what is within TLS: who is at the other end, the program itself must find out."""
    for site in BAD_CERTIFICATES:
        said = failure(session, tool, f"https://{site}.{SUFFIX}/").output.lower()
        assert "no failure" not in said and "certificate" in said, site


def test_a_refusal_lists_what_is_allowed_and_one_of_the_policy_says_so(session: Session, logs: Logs) -> None:
    for host, sentence in ((OTHER, f"allowed: *.{SUFFIX}"), (DENIED, f"{DENIED}:443 is denied by the policy")):
        assert sentence in logs(failure(session, "urllib", f"https://{host}/"))


def test_pip_downloads_and_installs(session: Session) -> None:
    found = run(
        session,
        f"""
import importlib.util, os, subprocess, sys
def pip(*words):
    command = [sys.executable, "-m", "pip", *words, "--index-url", "https://pypi.{SUFFIX}/simple/",
               "--disable-pip-version-check", "--no-cache-dir"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
if importlib.util.find_spec("pip") is None:
    found = "absent: pip"
else:
    pip("download", "--dest", "wheels", "egress-hello")
    pip("install", "--target", "installed", "egress-hello")
    said = subprocess.check_output([sys.executable, "-m", "egress_hello"], text=True,
                                   env={{**os.environ, "PYTHONPATH": "installed"}})
    found = [sorted(os.listdir("wheels")), said]
found
""",
    )
    wheels = ["egress_hello-1.0-py3-none-any.whl", "egress_words-1.0-py3-none-any.whl"]
    assert found.output == [wheels, "hello from a wheel\n"]
    assert found.usage.network.denied == 0


def test_uv_installs(session: Session) -> None:
    found = run(
        session,
        f"""
import os, shutil, subprocess, sys
uv = shutil.which("uv") or shutil.which("uv", path=os.path.dirname(sys.executable))
if uv is None:
    found = "absent: uv"
else:
    command = [uv, "pip", "install", "--target", "by-uv", "--python", sys.executable, "--no-cache", "--no-config",
               "--index-url", "https://pypi.{SUFFIX}/simple/", "egress-hello"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = sorted(name for name in os.listdir("by-uv") if name.endswith(".py"))
found
""",
    )
    assert found.output == ["egress_hello.py", "egress_words.py"]


def test_pip_says_why_it_has_no_index(session: Session) -> None:
    found = run(
        session,
        f"""
import importlib.util, subprocess, sys
command = [sys.executable, "-m", "pip", "download", "--index-url", "https://{OTHER}/simple/", "--retries", "1", "x"]
done = subprocess.run(command, capture_output=True, text=True)
"absent: pip" if importlib.util.find_spec("pip") is None else done.stdout + done.stderr
""",
    )
    assert "403 " in found.output and "is not allowed for this session" in found.output


GIT = """
import os, shutil, subprocess
def git(*words):
    done = subprocess.run(["git", *words], capture_output=True, text=True, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"})
    return done.returncode, done.stdout + done.stderr
absent = "absent: git" if shutil.which("git") is None else ""
"""


def test_git_clones_over_https(session: Session) -> None:
    found = run(
        session,
        f"""{GIT}
status, said = git("clone", "--quiet", "https://git.{SUFFIX}/hello.git", "cloned")
absent or [status, said, open("cloned/README").read(), sorted(os.listdir("cloned"))]
""",
    )
    assert found.output == [0, "", "hello from a repository\n", [".git", "README", "lib"]]


def test_git_is_refused_another_host(session: Session, logs: Logs) -> None:
    found = run(session, f"{GIT}\nabsent or git('clone', 'https://{OTHER}/hello.git', 'refused')")
    status, said = found.output
    assert status != 0 and "403" in said
    assert REFUSED in logs(found)


# Not with its client for threads: before CPython 3.13 two of them must not read and write one TLS socket at a time, and
# that client's do, so that it hangs in its handshake now and then.
WEBSOCKETS = """
import asyncio, os
from websockets.asyncio.client import connect
async def _talk(url, messages):
    async with connect(url, open_timeout=30) as socket, asyncio.timeout(30):
        answers = []
        for message in messages:
            await socket.send(message)
            answers.append(await socket.recv())
        return answers
def talk(url, *messages):
    return asyncio.run(_talk(url, messages))
"""


def test_websockets_talk_in_both_directions(session: Session) -> None:
    for scheme in ("wss", "ws"):
        talking = f"talk('{scheme}://ws.{SUFFIX}/', 'words', os.urandom(300_000))"
        found = run(session, f"{WEBSOCKETS}\n[len(each) for each in {talking}]")
        assert found.output == [5, 300_000], scheme
        assert found.usage.network.sent_bytes > 300_000
        assert found.usage.network.received_bytes > 300_000


def test_a_websocket_to_another_host_is_refused(session: Session, logs: Logs) -> None:
    attempt = f"try:\n    talk('wss://{OTHER}/')\nexcept Exception as error:\n    said = repr(error)\nsaid"
    found = run(session, WEBSOCKETS + attempt)
    assert "403" in found.output
    assert REFUSED in logs(found)


def test_large_answers_arrive_whole_and_are_counted(session: Session) -> None:
    size = 20_000_000
    found = run(
        session,
        f"""
import hashlib, urllib.request
with urllib.request.urlopen("https://files.{SUFFIX}/bytes/{size}", timeout=60) as answer:
    digest = hashlib.sha256()
    while chunk := answer.read(1 << 20):
        digest.update(chunk)
digest.hexdigest() == hashlib.sha256(bytes({size})).hexdigest()
""",
    )
    assert found.output is True
    # TLS adds its records' heads and the handshake.
    assert size < found.usage.network.received_bytes < size * 1.02 + 20_000


def test_each_new_result_counts_its_own_step(session: Session) -> None:
    before = run(session, f"{FETCH['urllib']}\nfetch('http://files.{SUFFIX}/hello.txt')").usage.network
    nothing = run(session, "1 + 1").usage.network
    after = run(session, f"fetch('http://files.{SUFFIX}/hello.txt')").usage.network
    assert (nothing.connections, nothing.sent_bytes, nothing.received_bytes) == (0, 0, 0)
    assert (after.connections, after.received_bytes) == (1, before.received_bytes)


def test_without_a_grant_a_session_says_that_it_has_no_network(client: ExecutorClient) -> None:
    with client.create_session(authorized_imports=["*"]) as session:
        assert session.network == ()
        result = session.execute(f"{FETCH['urllib']}\nfetch('https://files.{SUFFIX}/hello.txt')")
        assert result.error is not None
        assert "this sandbox has no network" in f"{result.error.message}{result.logs}"
        variables = session.execute("import os\n[name for name in os.environ if 'proxy' in name.lower()]")
        assert variables.output == []


def test_a_session_lists_its_hosts(session: Session) -> None:
    assert list(session.network) == [f"*.{SUFFIX}"]
