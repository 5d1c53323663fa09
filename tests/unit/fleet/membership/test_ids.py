"""Ids of sessions say which node has them, and since which epoch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.fleet.membership.ids import MAX_EPOCH, epoch_of, is_node_name, new_session_id, node_of

nodes = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?", fullmatch=True)


@given(nodes, st.integers(1, MAX_EPOCH))
def test_an_id_says_its_node_and_epoch(node: str, epoch: int) -> None:
    session_id = new_session_id(node, epoch)
    assert len(session_id) <= 64
    assert (node_of(session_id), epoch_of(session_id)) == (node, epoch)


def test_ids_are_random() -> None:
    assert len({new_session_id("n", 1) for _ in range(1000)}) == 1000


@pytest.mark.parametrize(
    "text",
    ["", "-", "n", "n-", f"-{'0' * 32}", "0" * 32, f"N-{'0' * 32}", f"n-{'0' * 31}", f"n-{'G' * 32}", f"n--{'0' * 32}",
     f"n-{'0' * 32}\n", f"{'n' * 25}-{'0' * 32}", f"n-{'A' * 32}"],
)  # fmt: skip
def test_other_texts_name_no_node(text: str) -> None:
    assert node_of(text) is None


@given(st.text(max_size=40))
def test_a_text_is_refused_or_read_as_it_was_made(text: str) -> None:
    node = node_of(text)
    assert node is None or (is_node_name(node) and text.startswith(f"{node}-"))
