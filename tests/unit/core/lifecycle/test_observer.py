"""Observers: one object that passes each notification on to several, in order."""

from __future__ import annotations

from executor_server.core.lifecycle import Observer, Observers


def _notifications() -> list[str]:
    return [name for name in vars(Observer) if not name.startswith("_")]


def test_each_notification_reaches_every_observer_in_order_with_its_facts() -> None:
    heard: list[tuple[str, str, tuple[object, ...]]] = []

    def recorder(who: str) -> Observer:
        observer = Observer()
        for name in _notifications():
            setattr(observer, name, lambda *facts, name=name: heard.append((who, name, facts)))
        return observer

    both = Observers([recorder("first"), recorder("second")])
    for name in _notifications():
        getattr(both, name)(name, 1)
    assert heard == [(who, name, (name, 1)) for name in _notifications() for who in ("first", "second")]


def test_an_observer_without_a_method_of_its_own_costs_no_call() -> None:
    class Deaf(Observer):
        def execution_ended(self, *facts: object) -> None:
            heard.append(facts)

    heard: list[tuple[object, ...]] = []
    both = Observers([Observer(), Deaf()])
    assert [len(getattr(both, name).args[0]) for name in ("execution_started", "execution_ended")] == [0, 1]
    both.execution_ended(None, "1", None, 0.0)  # type: ignore[arg-type]  # no observer reads them
    assert heard == [(None, "1", None, 0.0)]


def test_without_observers_a_notification_does_nothing() -> None:
    none = Observers([])
    none.execution_started(None, "1")  # type: ignore[arg-type]  # no observer reads the session
