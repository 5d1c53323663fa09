"""The status of a hostile or broken daemon is still one error of ours."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from executor_api.v1 import types_pb2
from executor_client._core.status import VIOLATIONS_MAX, breaks_stream, translate
from executor_client.errors import ExecutorClientError, PolicyViolationError, UnavailableError
from executor_client.waits import Progress


class Error(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, message: str | None, metadata: Any) -> None:
        super().__init__()
        self._code, self._message, self._metadata = code, message, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._message

    def trailing_metadata(self) -> Any:
        return self._metadata


def details(*messages: Any) -> tuple[tuple[str, bytes], ...]:
    status = status_pb2.Status()
    for message in messages:
        packed = any_pb2.Any()
        packed.Pack(message)
        status.details.append(packed)
    return (("grpc-status-details-bin", status.SerializeToString()),)


@given(st.sampled_from(grpc.StatusCode), st.text(), st.binary(max_size=50))
def test_any_status_is_translated(code: grpc.StatusCode, message: str, raw: bytes) -> None:
    broken = status_pb2.Status()
    broken.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=raw)
    for data in (raw, broken.SerializeToString()):
        error = translate(Error(code, message, (("grpc-status-details-bin", data),)))
        assert isinstance(error, ExecutorClientError)
    assert isinstance(translate(Error(code, None, None)), ExecutorClientError)


def test_details_of_another_domain_are_not_ours() -> None:
    info = error_details_pb2.ErrorInfo(reason="SESSION_LOST", domain="elsewhere")
    error = Error(grpc.StatusCode.UNAVAILABLE, "", details(info))
    assert translate(error).reason == ""
    assert breaks_stream(error)


def test_number_of_violations_is_bounded() -> None:
    many = types_pb2.Violations(violations=[types_pb2.Violation(field="f")] * (VIOLATIONS_MAX + 1))
    error = translate(Error(grpc.StatusCode.PERMISSION_DENIED, "", details(many)))
    assert isinstance(error, PolicyViolationError)
    assert len(error.violations) == VIOLATIONS_MAX


def making(**metadata: str) -> Progress | None:
    info = error_details_pb2.ErrorInfo(reason="IMAGE_NOT_READY", domain="remote-executor", metadata=metadata)
    error = translate(Error(grpc.StatusCode.UNAVAILABLE, "", details(info)))
    assert isinstance(error, UnavailableError)
    return error.progress


def test_progress_is_read_and_an_image_that_is_fetched_has_none() -> None:
    assert making(step="resolving") == Progress("resolving")
    assert making(step="installing", done="17", total="23", unit="packages") == Progress(
        "installing", 17, 23, "packages"
    )
    assert making() is None and making(done="1", total="2") is None


@given(st.text(), st.text(), st.text(), st.text())
def test_progress_of_a_hostile_daemon_is_bounded(step: str, done: str, total: str, unit: str) -> None:
    progress = making(step=step, done=done, total=total, unit=unit)
    if progress is not None:
        assert 0 <= progress.done <= max(progress.total, 0) < 10**12
        assert len(progress.step) <= 64 and len(progress.unit) <= 64
    assert making(step="x", done="9" * 5_000, total="-3") == Progress("x")


@pytest.mark.parametrize(("code", "broken"), [("UNAVAILABLE", True), ("INTERNAL", True), ("NOT_FOUND", False)])
def test_daemons_own_word_ends_a_stream_for_good(code: str, broken: bool) -> None:
    assert breaks_stream(Error(grpc.StatusCode[code], "", ())) is broken
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain="remote-executor")
    assert not breaks_stream(Error(grpc.StatusCode[code], "", details(info)))
