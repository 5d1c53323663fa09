"""Claims about the tokens that a front hands to its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_server.core.config import StateDirError
from executor_server.policy.identity import FrontTokens, TokenFile, Tokens, make_token


def made(directory: Path, token: str) -> FrontTokens:
    (directory / "token").write_text(token)
    return FrontTokens(TokenFile(directory / "tokens.json"), token, directory / "token")


def test_nodes_know_the_tenants_tokens_and_the_fronts_own(tmp_path: Path) -> None:
    own = make_token()
    _, of_tenant = TokenFile(tmp_path / "tokens.json").new("acme", "test")
    records = made(tmp_path, own)
    records.read()
    node = TokenFile(tmp_path / "node.json")
    node.path.write_bytes(records.content())
    node.path.chmod(0o600)
    tokens = Tokens("x" * 43, node)
    principals = [tokens.principal_of_id(tokens.id_of(each) or "?") for each in (own, of_tenant)]
    assert [(each.tenant, each.is_admin) for each in principals if each] == [("local", True), ("acme", False)]


def test_the_same_token_makes_the_same_content_at_each_start(tmp_path: Path) -> None:
    own = make_token()
    first = made(tmp_path, own)
    again = FrontTokens(TokenFile(tmp_path / "tokens.json"), own, tmp_path / "token")
    assert first.content() == again.content()


def test_a_record_of_the_file_does_not_take_the_place_of_the_fronts_own(tmp_path: Path) -> None:
    """A tenant's record with the id of the front's token would be another principal with it."""
    record, token = TokenFile(tmp_path / "tokens.json").new("acme", "test")
    records = made(tmp_path, token)
    assert [each.tenant for each in records.read() if each.id == record.id] == ["local"]


def test_a_token_without_a_records_form_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(StateDirError, match="remove the file"):
        made(tmp_path, "t" * 43)
