"""What objects of the client show at a prompt and in a notebook: short, one line, harmless."""

from __future__ import annotations

import enum
import io
from typing import Any

import PIL.Image
import pytest

import executor_client
from executor_api.values import EnumValue, OpaqueValue, Record, TupleRecord
from executor_client import (
    AsyncExecutorClient,
    ErrorDetail,
    ExecutionResult,
    ExecutorClient,
    LogEvent,
    Outcome,
    Tool,
    VariablesState,
)
from executor_client._core.images import check_image
from executor_client._core.short_repr import PAGE_CHARS_MAX, REPR_CHARS_MAX, ShortRepr
from executor_client.smolagents import RemoteExecutor

HOSTILE = "\x1b[2J\u202e\r\n<script>alert(1)</script>"


def result(**values: Any) -> ExecutionResult:
    return ExecutionResult(
        execution_id="e", outcome=Outcome.SUCCEEDED, state=VariablesState.KEPT, generation=1, **values
    )


def png(*size: int) -> Any:
    file = io.BytesIO()
    PIL.Image.new("RGB", list(size or (3, 2)), "red").save(file, "PNG")
    return check_image(file.getvalue(), "image/png", "figure")


def test_a_result_says_what_counts_in_one_line() -> None:
    assert repr(result(output=22, logs="working\n")) == (
        "ExecutionResult(outcome=Outcome.SUCCEEDED, state=VariablesState.KEPT, output=22, logs='working\\n')"
    )


@pytest.mark.parametrize(
    "value",
    [
        result(output=HOSTILE, logs=HOSTILE * 9_999, stdout="x" * 9_999),
        result(output=OpaqueValue("A", HOSTILE)),
        result(output=[["x" * 10**6] * 100] * 100),
        result(output=10**5000),
        result(error=ErrorDetail("E", HOSTILE, traceback="x" * 9_999)),
        LogEvent(1, "stdout", HOSTILE * 999),
        png(),
    ],
)
def test_whatever_a_sandbox_sent_is_one_short_printable_line(value: object) -> None:
    assert len(repr(value)) <= REPR_CHARS_MAX and repr(value).isprintable()


@pytest.mark.parametrize("value", [Record("a.T\x1b[2J", {"x": 1}), TupleRecord("T\x9b", ["x"], [1])])
def test_a_type_s_name_can_t_control_a_terminal(value: object) -> None:
    assert repr(value).isprintable() and repr(value).endswith("(x=1)")


def test_an_enum_s_member_can_t_control_a_terminal() -> None:
    assert str(EnumValue("a.E", "red", 1)) == "E.red"
    assert str(EnumValue("a.E\x1b[2J", "red\n", 1)).isprintable()


def test_an_opaque_value_is_short_at_a_prompt_and_whole_as_text() -> None:
    value = OpaqueValue("A", "r" * 2_000, "s" * 2_000)
    assert len(repr(value)) < 1_000 and len(str(value)) == 2_000


def test_every_public_class_says_itself_in_the_same_way() -> None:
    """But enums, errors, and a checkpoint, which is bytes."""
    named = [getattr(executor_client, name) for name in executor_client.__all__] + [RemoteExecutor]
    classes = [each for each in named if isinstance(each, type) and each.__module__.startswith("executor_client")]
    others = (enum.Enum, BaseException, executor_client.Checkpoint)
    assert [each.__name__ for each in classes if not issubclass(each, (ShortRepr, *others))] == []


def test_secrets_are_not_shown() -> None:
    class Holder:
        def __repr__(self) -> str:
            return "sekret"

        def call(self) -> None: ...

    shown: list[object] = [
        ExecutorClient("127.0.0.1:1", token="sekret"),
        RemoteExecutor(address="127.0.0.1:1", token="sekret", env={"KEY": "sekret"}),
        Tool(Holder().call),
    ]
    for value in shown:
        assert "sekret" not in repr(value)


def test_an_object_that_was_not_made_whole_says_so_much() -> None:
    assert repr(object.__new__(ExecutorClient)) == "ExecutorClient()"
    assert repr(object.__new__(AsyncExecutorClient)) == "AsyncExecutorClient()"


def test_a_notebook_gets_the_images_and_no_markup_of_the_program() -> None:
    error = ErrorDetail("E", HOSTILE, traceback=HOSTILE)
    page = result(output=HOSTILE, logs=HOSTILE, image_entries=(png(), png(5000, 10)), error=error)._repr_html_()
    assert "<script" not in page
    assert page.count("<img ") == 2


def test_an_output_that_was_displayed_is_shown_once() -> None:
    shown = png()
    assert result(output=shown.pil.copy(), image_entries=(shown,))._repr_html_().count("<img ") == 1
    assert result(output=PIL.Image.new("CMYK", (4, 4)), image_entries=(shown,))._repr_html_().count("<img ") == 2


def test_a_notebook_s_page_is_bounded() -> None:
    page = result(logs="&" * 10**6, image_entries=(png(),) * 99)._repr_html_()
    assert PAGE_CHARS_MAX <= page.count("&amp;") < 2 * PAGE_CHARS_MAX and page.count("<img ") < 20


def test_an_image_shows_itself_if_it_can_be_decoded() -> None:
    data = png(5000, 10)._repr_png_()
    assert PIL.Image.open(io.BytesIO(data)).size == (1600, 3)
    assert check_image(b"no image", "image/png", "figure")._repr_png_() is None
    assert result()._repr_png_() is None
    assert result(image_entries=(png(),))._repr_png_() == png()._repr_png_()
