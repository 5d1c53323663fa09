"""Recordings that are shown: whatever they hold, a terminal and a browser only get text."""

from __future__ import annotations

import io
import json
import re
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import PIL.Image
import pytest
from google.protobuf import json_format

from executor_api import strict_json
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_client import recording
from executor_client._core.values import pack
from executor_client.cli import main
from executor_client.errors import RecordingError
from executor_client.recording import Recorder, Recording, packed_json
from executor_client.replays.comparison import alike
from executor_client.replays.timeline import FrameKind, frames

HOSTILE = [
    "<script>alert(1)</script>",
    "</pre></style></title><img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    '" onmouseover="alert(1)',
    "' style='x:expression(alert(1))",
    "javascript:alert(1)",
    "<!--<meta http-equiv=refresh content=0;url=//evil>-->",
    "&lt;b&gt; &#60;i&#62; &amp",
    "\x1b]0;owned\x07\x1b[2J\x1b[1;1H\x1b[8m",
    "\x1b]52;c;cm0gLXJmIC8=\x07\x9b31m",
    "\r\x08\x08\x00\x7f\x85",
    "abc\u202egnp.exe\u2066\u2069\u200f",
    "line\u2028separator\u2029",
    "a" * 3000,
]
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Page(HTMLParser):
    """The elements and attributes of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A recording with each hostile text in each place that holds texts, and with three images."""
    path = tmp_path / "<script>alert(2)<&>\x1b[2J.rxr"
    png = io.BytesIO()
    PIL.Image.new("RGB", (20, 10), "red").save(png, "PNG")
    with Recorder(path) as recorder:

        def add(step: int, **fields: object) -> None:
            recorder.add("event", pb.Event(**fields), step=step)  # type: ignore[arg-type]

        def value(of: object) -> pb.Value:
            return pb.Value(packed=recorder.payload(pack(of)))

        for text in HOSTILE:
            recorder.add("session", {"session_id": text, "image": text, "python_version": text})
            recorder.add("tools", service_pb.RegisterToolsRequest(tools=[pb.ToolSpec(name=text)]))
            recorder.add("model", {"model": text, "answer": {"inline": ""}, "error": {"type": text, "message": text}})
            step = recorder.begin_step(service_pb.ExecuteRequest(execution_id=text, code=text))
            add(step, tool_call=pb.ToolCallEvent(call_id="c", name=text, arguments=value(((text,), {text: text}))))
            recorder.add("answer", service_pb.SubmitToolResultRequest(call_id="c", value=value(text)), step=step)
            add(step, log=pb.LogEvent(stream=pb.OUTPUT_STREAM_STDOUT, text=text))
            add(step, log=pb.LogEvent(stream=pb.OUTPUT_STREAM_STDERR, text=text))
            failed = {"outcome": pb.OUTCOME_EXCEPTION, "error": pb.ErrorDetail(type=text, message=text)}
            add(step, result=pb.ExecutionResult(output=value({text: [text]}), **failed))  # type: ignore[arg-type]
            command = service_pb.StartProcessRequest(process_id="p", argv=[text, text])
            recorder.add("command", command)
            for stream in (pb.OUTPUT_STREAM_STDOUT, pb.OUTPUT_STREAM_STDERR):
                printed = pb.ProcessEvent(output=pb.ProcessOutput(stream=stream, data=text.encode() + b"\xff\x9b"))
                recorder.add("output", service_pb.RecordedProcessEvent(process_id="p", event=printed))
            recorder.note(text, unknown=True)
        step = recorder.begin_step(service_pb.ExecuteRequest(execution_id="images", code="draw()"))
        for data, kind in (
            (png.getvalue() + b"<script>alert(1)</script>", "image/png"),
            (png.getvalue(), "image/png"),
            (b"<svg onload=alert(1)>", "image/svg+xml"),
        ):
            image = pb.ImageEvent(data=recorder.payload(data), mime_type=kind, source="<script>")
            add(step, image=image)
    return path


def test_a_page_has_no_element_of_a_recording(hostile: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert main(["replay", str(hostile), "--html", str(out)]) == 0
    assert out.stat().st_mode & 0o777 == 0o600
    text = out.read_text()
    page = Page(text)
    ours = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "span", "pre", "img"}
    assert page.elements == ours
    assert {(tag, name) for tag, name, _ in page.attributes} == {
        ("html", "lang"),
        ("meta", "charset"),
        ("meta", "http-equiv"),
        ("meta", "content"),
        ("meta", "name"),
        ("p", "class"),
        ("div", "class"),
        ("img", "alt"),
        ("img", "src"),
    }
    policy = next(value for tag, name, value in page.attributes if (tag, name) == ("meta", "content"))
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    images = [value for tag, name, value in page.attributes if (tag, name) == ("img", "src")]
    assert images
    assert all(re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/=]+", each) for each in images)
    assert "PHNjcmlwdD" not in text  # "<script>" after the end of an image
    assert not UNSAFE.search(text)
    assert HOSTILE[1] in page.text and "\\x1b]52;c;" in page.text and "\\u202egnp.exe" in page.text


def test_a_terminal_obeys_nothing_of_a_recording(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(hostile)]) == 0
    out = capsys.readouterr().out
    assert not UNSAFE.search(out)
    assert "\\x1b]52;c;" in out
    cast = tmp_path / "run.cast"
    assert main(["replay", str(hostile), "--cast", str(cast)]) == 0
    header, *events = [json.loads(line) for line in cast.read_text().splitlines()]
    assert header["version"] == 2
    assert all(kind == "o" for _, kind, _ in events)
    assert [at for at, _, _ in events] == sorted(at for at, _, _ in events)
    shown = "".join(text for _, _, text in events)
    assert not UNSAFE.search(re.sub(r"\x1b\[\d\d?m|\r\n", "", shown))  # our colours, and ends of lines


@pytest.mark.parametrize("option", ["--html", "--cast"])
def test_a_page_that_can_not_be_written_is_named(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """The recording was named, as if it could not be read."""
    assert main(["replay", str(hostile), option, str(tmp_path / "missing/page")]) == 2
    assert f"executor: {tmp_path}/missing/page can't be written: No such file" in capsys.readouterr().err


def test_a_changed_byte_is_refused(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(hostile.read_bytes())
    data[len(data) // 2] ^= 1
    hostile.write_bytes(data)
    for arguments in (["replay", str(hostile)], ["record", "diff", str(hostile), str(hostile)]):
        assert main(arguments) == 2
        assert "edited or damaged" in capsys.readouterr().err


def test_values_are_alike_but_for_addresses_and_temporary_paths() -> None:
    before = {"at": ["<object at 0x7f3a5c1d2e80>", ("/tmp/tmpab12cd_9/x", 1.5)]}
    assert alike(before, {"at": ["<object at 0x7fffffffffff>", ("/tmp/tmpzzzzzzzz/x", 1.5)]})
    assert not alike(before, {"at": ["<object at 0x7fffffffffff>", ("/tmp/other/x", 1.5)]})
    assert not alike([1], [True]) and not alike([1], (1,)) and not alike(1.0, 1) and not alike("0x12", "0x13")
    assert alike(float("nan"), float("nan"))


@pytest.mark.parametrize("time_s", ["-1", "1e300", "1e400", "1" + "0" * 400])
def test_an_impossible_time_is_refused(
    time_s: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = packed_json
    monkeypatch.setattr(recording, "packed_json", lambda value: _with_time(written(value), time_s))
    with Recorder(tmp_path / "run.rxr") as recorder:
        recorder.add("session", {"session_id": "s"})
    monkeypatch.undo()
    assert main(["replay", str(tmp_path / "run.rxr"), "--cast", str(tmp_path / "run.cast")]) == 2
    assert "entry 1 is not as a recorder writes it" in capsys.readouterr().err


def test_an_answer_of_a_model_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    """Reading takes less of the stack than writing, so some depths could be read and then ended in RecursionError."""
    depth, read = 10, strict_json.reader()
    with suppress(strict_json.NotJson):
        while True:
            read(_nested(depth + 1))
            depth += 1
    for below in range(40):
        with Recorder(tmp_path / "run.rxr") as recorder:
            answer = json_format.MessageToDict(recorder.payload(_nested(depth - below)))
            recorder.add("model", {"model": "m", "answer": answer})
        with Recording(tmp_path / "run.rxr") as recorded, suppress(RecordingError):
            assert [each.kind for each in frames(recorded)] == [FrameKind.MODEL]


def _nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def _with_time(line: bytes, time_s: str) -> bytes:
    return re.sub(rb'"time": ?[\d.]+', f'"time":{time_s}'.encode(), line)
