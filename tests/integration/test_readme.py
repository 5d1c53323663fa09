"""The programs of the readme and the tutorial run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from examples.scripted import Reply, ScriptedModel
from executor_client import ExecutorClient
from executor_client.smolagents import CodeAgent
from tests.support.backends import require
from tests.support.daemon import daemon_of
from tests.support.internet.world import Internet

EXECUTION = """
import requests
print(requests.get("https://www.example.com/").text, requests.get("https://api.github.com/zen").text)
try:
    requests.get("https://search.example/")
except requests.RequestException as error:
    final_answer(str(error))
"""
README = Path(__file__).parents[2] / "README.md"
TUTORIAL = README.with_name("docs") / "tutorial.md"


def test_readmes_program_prints_what_stands_below_it() -> None:
    require("local")
    (program,) = re.findall(r"^```python\n(from executor_client import.*?)^```", README.read_text(), re.M | re.S)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    (said,) = re.findall(r"^```\n\n((?:    .*\n)+)", README.read_text()[README.read_text().index(program) :], re.M)[:1]
    assert ran.stdout == textwrap.dedent(said)


def test_readmes_agent_with_a_network_fetches_under_its_policy(
    internet: Internet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (policy,) = re.findall(r"^```toml\n(default = .*?network.*?)^```", README.read_text(), re.M | re.S)
    assert len([line for line in policy.splitlines() if line]) == 5
    for host in ("www.example.com", "api.github.com"):
        internet.names.address(host, internet.address)
    try:
        with daemon_of(f"[pool]\nsize = 0\n{internet.config()}", policy=policy) as daemon:
            monkeypatch.setenv("EXECUTOR_STATE_DIR", str(daemon.state_dir))
            model = ScriptedModel([Reply(thought="I fetch both.", code=EXECUTION)])
            with CodeAgent(
                tools=[],
                model=model,
                additional_authorized_imports=["requests"],
                executor_kwargs={"network": ["api.github.com"]},
            ) as agent:
                answer = agent.run("Fetch both pages.")
    finally:
        for host in ("www.example.com", "api.github.com"):
            internet.names.forget(host)
    printed = " ".join(f"{capsys.readouterr().out} {answer}".split())
    assert "www.example.com is here" in printed and "api.github.com is here" in printed
    refusal = "search.example:443 is not allowed for this session; allowed: api.github.com, www.example.com"
    assert refusal in printed and refusal in " ".join(README.read_text().split())


def test_tutorials_blocks_print_what_stands_below_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require("local")
    monkeypatch.chdir(tmp_path)
    page, _, _ = TUTORIAL.read_text().partition("## 7. With an agent")
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n((?:    [^\n]*\n)+))?", page, re.M | re.S)
    names: dict[str, object] = {}
    try:
        for program, shown in blocks:
            exec(program, names)
            assert capsys.readouterr().out == textwrap.dedent(shown)
    finally:
        client = names["client"]
        assert isinstance(client, ExecutorClient)
        client.close()
    assert (tmp_path / "dice.png").read_bytes().startswith(b"\x89PNG")
