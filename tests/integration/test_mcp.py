"""`executor mcp` as a host runs it: the official client over stdin and stdout, against a real daemon."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator

import PIL.Image
import pytest
from mcp.types import BlobResourceContents, EmbeddedResource, ImageContent, TextContent

from executor_client import ExecutorClient, Session
from tests.support.daemon import Daemon
from tests.support.mcp_host import McpHost, connected, environment, text_of
from tests.support.mcp_sdk import McpError, is_error, wire
from tests.support.polling import eventually

IMPORTS = "matplotlib.*,PIL.*,numpy.*,os,time,pathlib"


@pytest.fixture(scope="module")
def shared_host(daemon: Daemon) -> Iterator[McpHost]:
    with connected(environment(daemon), "--authorized-imports", IMPORTS) as host:
        yield host
        assert host.said_on_stderr() == ""


@pytest.fixture
def host(shared_host: McpHost) -> Iterator[McpHost]:
    """A host, without a session at the start of each test."""
    yield shared_host
    for name in re.findall(r"^(\S+) ", text_of(shared_host.call("list_sessions")), re.MULTILINE)[1:]:
        shared_host.call("close_session", session=name)


def session_of(host: McpHost, client: ExecutorClient, name: str = "default") -> Session:
    (info,) = [info for info in client.list_sessions() if info.labels.get("name") == name]
    return client.get_session(info.session_id)


# ---------------------------------------------------------------------------------------------------------------------
# Code


def test_code_gives_its_output_and_value_and_keeps_its_variables(host: McpHost) -> None:
    text = host.run("x = 41\nprint('printed')\nx + 1")
    assert re.fullmatch(r"printed\n\nValue: 42\n\[succeeded after \d+\.\d\d s in session 'default'\]", text)
    assert "Value: [41, {'a': (1, 2.5)}, None]" in host.run("[x, {'a': (1, 2.5)}, None]")
    assert "Value: <function f at " in host.run("def f(): pass\nf")
    assert "Value:" not in host.run("None")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", "Code execution failed at line '1 / 0' due to: ZeroDivisionError: division by zero\nTraceback"),
        ("import socket", "Import of socket is not allowed. Authorized imports are: ['PIL.*', "),
        ("x = (", "Code parsing failed on line 1 due to: SyntaxError: '(' was never closed"),
        ("while True: pass", "Code execution exceeded the maximum execution time"),
        ("print('out')\nraise KeyError('k')", "out\n\nCode execution failed at line 'raise KeyError('k')'"),
    ],
)
def test_code_that_fails_is_an_error_that_says_why_and_what_is_kept(host: McpHost, code: str, said: str) -> None:
    host.run("kept = 1")
    text = host.refusal("run_python", code=code, timeout_s=0.3)
    assert said in text
    assert "Variables, functions and imports defined before the failure are kept." in text
    assert "Value: 1" in host.run("kept")


def test_a_lost_interpreter_is_said(host: McpHost) -> None:
    text = host.refusal("run_python", code="x = 1\nopen('f', 'w').write('1')\nimport os\nos._exit(3)")
    assert "exit code 3" in text and "The interpreter had to be restarted: all variables" in text
    assert "NameError" in host.refusal("run_python", code="x")
    assert text_of(host.call("list_files")) == "'f' (1 bytes)"


def test_images_and_figures_come_in_order_with_the_output(host: McpHost) -> None:
    code = """
import matplotlib.pyplot as plt
from PIL import Image
print('first')
plt.figure(figsize=(2, 1), dpi=100); plt.plot([1, 2]); plt.show()
print('second')
display(Image.new('RGB', (30, 20), 'red'))
Image.new('RGB', (40, 10))
"""
    content = host.call("run_python", code=code).content
    kinds = [
        block.text.strip() if isinstance(block, TextContent) else opened(block).size
        for block in content
        if isinstance(block, TextContent | ImageContent)
    ]
    assert [kinds[0], *kinds[2:6]] == ["first", "second", (30, 20), "Value:", (40, 10)]
    assert isinstance(kinds[1], tuple), "the figure"
    assert isinstance(kinds[6], str) and kinds[6].startswith("[succeeded") and len(kinds) == 7


def opened(image: ImageContent) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(base64.b64decode(image.data)))


def test_output_reaches_the_host_while_the_code_runs(host: McpHost) -> None:
    """The code waits for a file, which is written once its output has come."""
    code = """
import os, time
print('waiting', flush=True)
print('ready', flush=True)
while not os.path.exists('go'): time.sleep(0.01)
print('gone on')
"""
    running = host.start("run_python", code=code)
    assert eventually(lambda: "ready\n" in "".join(log.data for log in host.logs))
    assert eventually(lambda: "ready" in [message for _, message in host.progress])
    assert not running.done()
    host.portal.call(host.client.call_tool, "write_file", {"path": "go", "content": ""})
    assert "gone on" in text_of(running.result())
    assert {log.logger for log in host.logs} == {"run_python"}
    numbers = [number for number, _ in host.progress]
    assert numbers == sorted(set(numbers)), "progress only rises"


def test_much_output_is_shown_live_up_to_a_limit_and_cut_in_the_result(host: McpHost) -> None:
    text = host.run("for i in range(20_000): print('line', i)")
    assert eventually(lambda: "[more output comes with the result]" in [log.data for log in host.logs])
    assert sum(len(log.data) for log in host.logs) < 40_000
    assert text.startswith("line 0\n") and "line 19999\n" in text and "truncated to stay below" in text
    assert len(text) < 51_000


def test_a_call_that_the_host_cancels_ends_and_the_session_goes_on(host: McpHost, client: ExecutorClient) -> None:
    host.run("kept = 1")
    running = host.start("run_python", code="print('here')\nwhile True: pass")
    assert eventually(lambda: host.logs)
    assert session_of(host, client).info.state.value == "busy"
    running.cancel()
    assert eventually(lambda: session_of(host, client).info.state.value == "idle")
    assert "Value: 1" in host.run("kept")


def test_what_the_policy_does_not_grant_is_refused_with_all_violations(daemon: Daemon) -> None:
    options = ("--limit", "wall_time_s=1e9", "--limit", "processes=1000000", "--image", "base")
    with connected(environment(daemon), *options) as host:
        text = host.refusal("run_python", code="1")
        assert "the policy refuses this:\n" in text
        assert "limits.wall_time_s: asked for 1,000,000,000" in text
        assert "limits.processes: asked for 1,000,000" in text
        assert text_of(host.call("list_sessions")) == "no sessions yet; run_python creates one"
        assert "wall_time_s" in text_of(host.call("get_policy"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "code\n  Field required"),
        ({"code": 1}, "code\n  Input should be a valid string"),
        ({"code": "x" * 2_000_000}, "the code has 2000000 bytes; the limit is 1048576"),
        ({"code": "1", "timeout_s": 0}, "greater than 0"),
        ({"code": "1", "timeout_s": 1e9}, "the policy refuses this:\n  limits.wall_time_s: asked for 1,000,000,000"),
        ({"code": "1", "session": "../x"}, "'../x' is not a session name"),
        ({"code": "1\0"}, "code holds a NUL character"),
    ],
)
def test_calls_that_make_no_sense_are_refused_in_words(host: McpHost, arguments: dict[str, object], said: str) -> None:
    assert said in host.refusal("run_python", **arguments)
    assert "Value: 1" in host.run("1")


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_files_are_written_listed_and_read(host: McpHost) -> None:
    assert text_of(host.call("write_file", path="d/a é.txt", content="é\n")) == "wrote 'd/a é.txt' (3 bytes)"
    data = bytes(range(256))
    host.call("write_file", path="b.bin", content=base64.b64encode(data).decode(), encoding="base64")
    host.run("from PIL import Image\nImage.new('RGB', (7, 5)).save('i.png')")
    listed = text_of(host.call("list_files"))
    assert {"'d' (directory)", "'d/a é.txt' (3 bytes)", "'b.bin' (256 bytes)"} <= set(listed.splitlines())
    assert text_of(host.call("list_files", path="d")) == "'d/a é.txt' (3 bytes)"
    assert text_of(host.call("read_file", path="d/a é.txt")) == "é\n"
    (image,) = host.call("read_file", path="i.png").content
    assert isinstance(image, ImageContent) and opened(image).size == (7, 5)
    (raw,) = host.call("read_file", path="b.bin").content
    assert isinstance(raw, EmbeddedResource) and isinstance(raw.resource, BlobResourceContents)
    assert base64.b64decode(raw.resource.blob) == data
    (resource,) = host.portal.call(host.client.read_resource, raw.resource.uri).contents
    assert isinstance(resource, BlobResourceContents) and base64.b64decode(resource.blob) == data
    (resource,) = host.portal.call(host.client.read_resource, "sandbox://default/d/a%20%C3%A9.txt").contents
    assert isinstance(resource, BlobResourceContents) and base64.b64decode(resource.blob).decode() == "é\n"


@pytest.mark.parametrize("path", ["../x", "/proc/self/mem", "", ".", "a\0b", "x" * 5_000])
def test_paths_that_lead_to_no_file_of_the_sandbox_are_refused(host: McpHost, path: str) -> None:
    for tool, arguments in (("read_file", {}), ("write_file", {"content": "x"})):
        assert len(host.refusal(tool, path=path, **arguments)) < 6_000
    assert text_of(host.call("list_files")) == "no files"


def test_files_that_cannot_be_had_are_said_to_be_so(host: McpHost) -> None:
    host.run("import os\nos.symlink('/dev/zero', 'link')\nopen('big', 'w').truncate(5 << 20)")
    assert "there is no 'missing'" in host.refusal("read_file", path="missing")
    assert "not a regular file" in host.refusal("read_file", path="link")
    assert "'big' has more than 4,194,304 bytes" in host.refusal("read_file", path="big")
    assert "not base64" in host.refusal("write_file", path="x", content="é", encoding="base64")
    assert "at most 8,388,608 can be written" in host.refusal("write_file", path="x", content="x" * 9_000_000)
    for uri in ("sandbox://default/missing", "sandbox://default/../x", "sandbox://missing/x", "sandbox://default/%00"):
        with pytest.raises(McpError):
            host.portal.call(host.client.read_resource, uri)


# ---------------------------------------------------------------------------------------------------------------------
# Sessions


def test_sessions_of_other_names_are_other_sandboxes(host: McpHost) -> None:
    host.run("x = 1", session="one")
    assert "NameError" in host.refusal("run_python", code="x", session="two")
    host.run("x = 2", session="two")
    assert "Value: 1" in host.run("x", session="one")
    listed = text_of(host.call("list_sessions")).splitlines()
    assert [line.split()[:2] for line in listed] == [["SESSION", "STATE"], ["one", "idle"], ["two", "idle"]]
    assert "there is no session 'three'; existing: one, two" in host.refusal("list_files", session="three")
    assert "there is no session 'three'" in host.refusal("close_session", session="three")


def test_sessions_are_counted(host: McpHost, client: ExecutorClient) -> None:
    for name in "abcd":
        host.run("1", session=name)
    assert "at most 4 sessions; existing: a, b, c, d" in host.refusal("run_python", code="1", session="e")
    host.call("close_session", session="a")
    assert "Value: 1" in host.run("1", session="e")
    assert len(client.list_sessions()) == 4


def test_a_session_that_is_gone_is_said_and_never_silently_replaced(host: McpHost, client: ExecutorClient) -> None:
    host.run("x = 1")
    session_of(host, client).close()
    for _ in range(2):
        for tool, arguments in (("run_python", {"code": "1"}), ("list_files", {}), ("read_file", {"path": "x"})):
            text = host.refusal(tool, **arguments)
            assert "the session 'default' is gone, with its variables and files" in text and "reset_session" in text
    assert "gone: " in text_of(host.call("list_sessions"))
    assert text_of(host.call("reset_session")) == "the session 'default' is new and empty"
    assert "NameError" in host.refusal("run_python", code="x")


def test_reset_ends_what_runs(host: McpHost, client: ExecutorClient) -> None:
    running = host.start("run_python", code="print('here')\nwhile True: pass")
    assert eventually(lambda: host.logs)
    host.portal.call(host.client.call_tool, "reset_session", {})
    result = running.result()
    assert is_error(result) and "is lost" in text_of(result)
    assert "Value: 1" in host.run("1")
    assert len(client.list_sessions()) == 1


# ---------------------------------------------------------------------------------------------------------------------


def test_a_host_of_the_older_protocol_gets_the_same(daemon: Daemon) -> None:
    with connected(environment(daemon), "--imports", "PIL.*", mode="legacy") as host:
        result = host.call("run_python", code="print('hi')\nfrom PIL import Image\nImage.new('L', (3, 2))")
        assert [block.type for block in result.content] == ["text", "text", "image", "text"]
        assert eventually(lambda: [log.data for log in host.logs] == ["hi\n"])
        assert host.said_on_stderr() == ""


def test_tools_say_what_they_are_for(host: McpHost) -> None:
    tools = host.portal.call(host.client.list_tools).tools
    for tool in tools:
        assert tool.description and "\n   " not in tool.description
        assert tool.annotations is not None
        for argument in wire(tool)["inputSchema"]["properties"].values():
            assert argument["description"]
    assert host.client.instructions is not None
    for name in re.findall(r"\b\w+_\w+\b", host.client.instructions):
        assert name in {tool.name for tool in tools}


# ---------------------------------------------------------------------------------------------------------------------
# A shell, and edits


def test_a_command_runs_beside_the_code_in_the_same_place(host: McpHost) -> None:
    host.run("open('made.txt', 'w').write('by code')")
    assert text_of(host.call("shell", command="cat made.txt; exit 3")) == "[exit code 3]\nby code"
    assert "timeout of 0.5 seconds" in text_of(host.call("shell", command="sleep 100", timeout_s=0.5))
    host.call("shell", command="echo as it comes")
    assert eventually(lambda: [log.data for log in host.logs] == ["as it comes\n"])


def test_a_process_in_the_background_is_looked_at_and_ended(host: McpHost) -> None:
    started = text_of(host.call("shell", command="echo up; cat", background=True))
    (process,) = re.findall(r"Process (\S+) has been started", started)
    assert "echoed" in text_of(host.call("shell_output", process=process, text="echoed\n", wait_s=2))
    assert "signal 9" in text_of(host.call("shell_kill", process=process))
    assert "Running: none" in host.refusal("shell_output", process="p-none")


def test_a_cancelled_command_is_ended(host: McpHost, client: ExecutorClient) -> None:
    call = host.start("shell", command="echo begun; sleep 1000")
    assert eventually(lambda: bool(host.logs))
    call.cancel()
    session = session_of(host, client)
    assert eventually(lambda: not any(each.running for each in session.processes.list()))


def test_files_are_edited_searched_and_read_by_lines(host: McpHost) -> None:
    host.call("write_file", path="a.py", content="one\ntwo\nthree\n")
    assert text_of(host.call("edit_file", path="a.py", old="two", new="2")) == "Changed a.py at line 2."
    assert "not in 'a.py'" in host.refusal("edit_file", path="a.py", old="two", new="2")
    assert text_of(host.call("search_files", expression="th", pattern="*.py")) == "a.py:3: three"
    assert text_of(host.call("read_file", path="a.py", first_line=2)) == "2  2\n3  three"
