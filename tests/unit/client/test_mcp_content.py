"""The content for an MCP host: its limits, its order, and a note wherever something is left out."""

from __future__ import annotations

import base64
import io
from datetime import UTC, datetime
from typing import Any

import PIL.Image
import pytest
from mcp.types import ContentBlock, EmbeddedResource, ImageContent, TextContent

from executor_client import (
    ErrorDetail,
    ExecutionEvent,
    ExecutionResult,
    FileInfo,
    Image,
    ImageEvent,
    Limits,
    LimitWarningEvent,
    LogEvent,
    OpaqueValue,
    Outcome,
    OutputCutEvent,
    VariablesState,
)
from executor_client._core.images import check_image
from executor_client.mcp import content
from executor_client.mcp.content import Transcript, execution_content, file_content, image_blocks
from tests.support.mcp_sdk import is_error, wire


def picture(width: int, height: int, *, noise: bool = False, image_format: str = "PNG") -> Image:
    pil = PIL.Image.effect_noise((width, height), 100) if noise else PIL.Image.new("RGB", (width, height), "red")
    buffer = io.BytesIO()
    pil.save(buffer, image_format)
    return check_image(buffer.getvalue(), f"image/{image_format.lower()}", "display", pixels_left=10**8)


def opened(block: ContentBlock) -> PIL.Image.Image:
    assert isinstance(block, ImageContent)
    data = base64.b64decode(block.data, validate=True)
    assert len(data) <= content.IMAGE_BYTES_MAX
    image = PIL.Image.open(io.BytesIO(data))
    assert image.get_format_mimetype() == wire(block)["mimeType"]
    return image


def texts(blocks: list[ContentBlock]) -> list[str]:
    return [block.text for block in blocks if isinstance(block, TextContent)]


def last_text(**fields: Any) -> tuple[str, bool]:
    """Returns the last text of a result, and True if it is marked as an error."""
    replaced = fields.pop("replaced", False)
    made = {"outcome": Outcome.SUCCEEDED, "state": VariablesState.KEPT, "generation": 1, **fields}
    result = ExecutionResult(execution_id="e", **made)
    said = execution_content(result, Transcript(), "x = 1", Limits(), session="s", replaced=replaced)
    return texts(said.content)[-1], is_error(said)


def test_texts_and_images_come_in_the_order_in_which_the_program_made_them() -> None:
    transcript = Transcript()
    events: list[ExecutionEvent] = [
        LogEvent(1, "stdout", "a"),
        LogEvent(2, "stderr", "b"),
        ImageEvent(3, picture(3, 1)),
        ImageEvent(4, picture(4, 1)),
        OutputCutEvent(5, 1_000),
        LimitWarningEvent(6, "operations", 80, 100),
        ImageEvent(7, Image(b"?", "image/x", "display", refusal="it is odd")),
    ]
    for event in events:
        transcript.add(event)
    first, second, third, last = transcript.blocks()
    assert texts([first]) == ["ab"]
    assert (opened(second).width, opened(third).width) == (3, 4)
    (said,) = texts([last])
    assert "1,000 bytes of output left out" in said
    assert "80 of 100 operations are used up" in said
    assert "an image could not be shown: it is odd" in said


def test_long_output_is_cut_to_a_limit_that_its_parts_share() -> None:
    transcript = Transcript()
    transcript.add(LogEvent(1, "stdout", "a" * 3 * content.LOG_CHARS_MAX))
    transcript.add(ImageEvent(2, picture(1, 1)))
    transcript.add(LogEvent(3, "stdout", "b" * content.LOG_CHARS_MAX))
    before, after = texts(transcript.blocks())
    assert len(before + after) < content.LOG_CHARS_MAX + 300
    assert before.count("a") > 2.9 * after.count("b")
    assert all("truncated to stay below" in text for text in (before, after))


def test_a_rewritten_line_shows_its_last_state() -> None:
    transcript = Transcript()
    for number in range(100):
        transcript.add(LogEvent(number, "stderr", f"\r{number}%"))
    assert texts(transcript.blocks()) == ["99%"]


def test_images_past_the_limit_are_counted() -> None:
    transcript = Transcript()
    for number in range(content.IMAGES_MAX + 3):
        transcript.add(ImageEvent(number, picture(1, 1)))
    blocks = transcript.blocks()
    assert [block.type for block in blocks] == ["image"] * content.IMAGES_MAX + ["text"]
    assert texts(blocks) == ["[3 more images are not shown]"]


@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
def test_an_image_that_fits_is_passed_on_as_it_is(image_format: str) -> None:
    image = picture(200, 100, image_format=image_format)
    (block,) = image_blocks(image)
    assert isinstance(block, ImageContent)
    assert base64.b64decode(block.data) == image.data


def test_a_large_image_is_scaled_down_and_said_to_be() -> None:
    shown, note = image_blocks(picture(4_000, 1_000))
    assert opened(shown).size == (content.IMAGE_SIDE_MAX, content.IMAGE_SIDE_MAX // 4)
    assert texts([note]) == ["[scaled down from 4000x1000 pixels]"]


def test_an_image_that_compresses_badly_fits_all_the_same() -> None:
    image = picture(1_500, 1_500, noise=True)
    assert len(image.data) > content.IMAGE_BYTES_MAX
    shown, _ = image_blocks(image)
    assert opened(shown).width in (1_500, 750)


@pytest.mark.parametrize("mode", ["1", "P", "LA", "CMYK", "I", "F", "I;16", "YCbCr"])
def test_a_value_that_is_an_image_of_any_mode_is_shown_or_said_not_to_be(mode: str) -> None:
    result = ExecutionResult(
        execution_id="e",
        outcome=Outcome.SUCCEEDED,
        state=VariablesState.KEPT,
        generation=1,
        output=PIL.Image.new(mode, (30, 20)),
    )
    blocks = execution_content(result, Transcript(), "", Limits(), session="s", replaced=False).content
    assert texts(blocks)[0] == "Value:"
    assert isinstance(blocks[1], ImageContent) or f"an image of mode {mode} cannot be shown" in texts(blocks)


def test_a_long_value_is_cut() -> None:
    result = ExecutionResult(
        execution_id="e", outcome=Outcome.SUCCEEDED, state=VariablesState.KEPT, generation=1, output="x" * 10**6
    )
    blocks = execution_content(result, Transcript(), "", Limits(), session="s", replaced=False).content
    value = texts(blocks)[0]
    assert value.startswith("Value: 'xxx") and value.endswith("(only the first 20,000 characters are shown)")
    assert len(value) < content.VALUE_CHARS_MAX + 300


def test_a_table_keeps_its_columns() -> None:
    result = ExecutionResult(
        execution_id="e",
        outcome=Outcome.SUCCEEDED,
        state=VariablesState.KEPT,
        generation=1,
        output=OpaqueValue("pandas.DataFrame", "   a\n0  1"),
    )
    blocks = execution_content(result, Transcript(), "", Limits(), session="s", replaced=False).content
    assert texts(blocks)[0] == "Value:\n   a\n0  1"


def test_halves_of_characters_are_escaped() -> None:
    transcript = Transcript()
    transcript.add(LogEvent(1, "stdout", "a\ud800b"))
    assert texts(transcript.blocks()) == [r"a\ud800b"]


def test_a_result_says_what_became_of_the_session() -> None:
    failed = {"outcome": Outcome.EXCEPTION, "error": ErrorDetail("ValueError", "bad", line=1)}
    assert last_text() == ("[succeeded after 0.00 s in session 's']", False)
    said, is_error = last_text(**failed)
    assert is_error and said.startswith("Code execution failed at line 'x = 1' due to: ValueError: bad\n")
    assert "defined before the failure are kept" in said
    said, is_error = last_text(**failed, state=VariablesState.RESET, generation=2, replaced=True)
    assert is_error and "functions and imports are lost" in said
    said, is_error = last_text(generation=2, replaced=True)
    assert not is_error and "Before this call the interpreter had to be restarted" in said
    said, is_error = last_text(outcome=Outcome.LOST, state=VariablesState.LOST)
    assert is_error and "the sandbox is gone" in said and "reset_session" in said


def test_files_that_were_made_are_named_up_to_a_limit() -> None:
    files = tuple(FileInfo(f"f{number}\n", 1_234, False, datetime.now(UTC)) for number in range(30))
    said, _ = last_text(artifacts=files[:1])
    assert "Files created or changed: 'f0\\n' (1,234 bytes)\n" in said
    said, _ = last_text(artifacts=files)
    assert said.count("1,234 bytes") == content.FILES_LISTED_MAX and " and more\n" in said


def test_a_file_is_shown_as_what_it_is() -> None:
    (text,) = file_content("s", "a.txt", "é\n".encode()).content
    assert texts([text]) == ["é\n"]
    (image,) = file_content("s", "no-suffix", picture(5, 4).data).content
    assert opened(image).size == (5, 4)
    for data in (b"\xff\x00", b"a\0b", b"\x89PNG and no more", b"\xff\xd8\xff"):
        (raw,) = file_content("s", "d e/é.zip", data).content
        assert isinstance(raw, EmbeddedResource)
        assert wire(raw.resource) == {
            "uri": "sandbox://s/d%20e/%C3%A9.zip",
            "mimeType": "application/zip",
            "blob": base64.b64encode(data).decode(),
        }


def test_a_long_text_file_comes_without_its_middle() -> None:
    (block,) = file_content("s", "a.txt", b"a" * 200_000).content
    (text,) = texts([block])
    assert "truncated to stay below" in text and len(text) < content.FILE_CHARS_MAX + 300
