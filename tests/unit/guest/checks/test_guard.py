from __future__ import annotations

import pickle

import pytest

from executor_server.guest.checks.control import FinalAnswerGiven, find_control, guard


def test_ordinary_exception_is_left_to_its_handler() -> None:
    try:
        raise ValueError("mine")
    except ValueError:
        guard()


def test_control_exception_is_raised_on() -> None:
    with pytest.raises(FinalAnswerGiven) as caught:
        try:
            raise FinalAnswerGiven
        except BaseException:  # noqa: BLE001 (what agent code does)
            guard()
    assert caught.value.__context__ is None


def test_control_exception_is_found_deep_in_groups() -> None:
    control = FinalAnswerGiven()
    group: BaseExceptionGroup[BaseException] = BaseExceptionGroup("inner", [ValueError(), control])
    for _ in range(1000):
        group = BaseExceptionGroup("outer", [group])
    assert find_control(group) is control
    assert find_control(ExceptionGroup("plain", [ValueError()])) is None
    assert find_control(None) is None


def test_outside_a_handler_guard_does_nothing() -> None:
    guard()


def test_guard_of_a_pickled_function_does_nothing() -> None:
    elsewhere = pickle.loads(pickle.dumps(guard))
    try:
        raise FinalAnswerGiven
    except FinalAnswerGiven:
        elsewhere()
