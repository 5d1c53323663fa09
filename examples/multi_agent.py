"""A manager and the web agent that it manages, each with its code in a sandbox of its own; then a worker without one.

smolagents' own remote executors refuse managed agents. Here a managed agent is called like a tool, through this
process: its model, its tools and their network access stay here, and no sandbox knows of the other.
"""

from __future__ import annotations

import contextlib
import http.server
import secrets
import threading
import urllib.request
from collections.abc import Iterator

import smolagents
from own_daemon import own_daemon
from scripted import Reply, ScriptedModel
from smolagents import tool

from executor_client.smolagents import CodeAgent


@tool  # type: ignore[untyped-decorator]  # smolagents is untyped
def visit_webpage(url: str) -> str:
    """Gives the text of a web page.

    Args:
        url: its address
    """
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read(100_000).decode())


WEB_AGENT_SCRIPT = [
    Reply(
        thought="I read the start page.",
        reads={"site": r"(http://[\d.:]+/)"},
        code='print(visit_webpage("<<site>>"))',
    ),
    Reply(
        thought="It refers to a page of figures.",
        reads={"link": r"figures are at (http://\S+)"},
        code='page = visit_webpage("<<link>>")\nprint(page)',
    ),
    Reply(
        thought="There they are.",
        reads={"visitors": r"Visitors in May: (\d+)"},
        code="final_answer(<<visitors>>)",
    ),
]

MANAGER_SCRIPT = [
    Reply(
        thought="I ask my colleague for the visitors.",
        reads={"site": r"(http://[\d.:]+/)"},
        code='report = web_agent(task="How many visitors were there in May? Start at <<site>>")\nprint(report)',
    ),
    Reply(
        thought="I divide by the days of the month.",
        reads={"visitors": r"managed agent 'web_agent':\n(\d+)"},
        code="final_answer(round(<<visitors>> / 31, 1))",
    ),
]

WORKER_SCRIPT = [Reply(thought="Easy.", code='final_answer("abc".upper())')]

EDITOR_SCRIPT = [
    Reply(thought="I let the worker do it.", code='heading = worker(task="Write abc in capitals.")\nprint(heading)'),
    Reply(thought="Done.", reads={"word": r"\b([A-Z]{3})\b"}, code='final_answer("<<word>>!")'),
]


def manager_and_web_agent(site: str) -> float:
    with (
        CodeAgent(
            tools=[visit_webpage],
            model=ScriptedModel(WEB_AGENT_SCRIPT, "web agent's script"),
            name="web_agent",
            description="Reads web pages for you.",
        ) as web_agent,
        CodeAgent(
            tools=[],
            model=ScriptedModel(MANAGER_SCRIPT, "manager's script"),
            managed_agents=[web_agent],
        ) as manager,
    ):
        return float(manager.run(f"How many visitors per day did {site} have in May?"))


def manager_and_local_worker() -> str:
    worker = smolagents.CodeAgent(
        tools=[],
        model=ScriptedModel(WORKER_SCRIPT, "worker's script"),
        name="worker",
        description="Writes words.",
    )
    with CodeAgent(tools=[], model=ScriptedModel(EDITOR_SCRIPT, "editor's script"), managed_agents=[worker]) as editor:
        answer = editor.run("Make a heading of abc.")
    print("They ran on:", type(editor.python_executor).__name__, "and", type(worker.python_executor).__name__)
    return str(answer)


# ---------------------------------------------------------------------------------------------------------------------
# A web to read


@contextlib.contextmanager
def web_site(visitors: int) -> Iterator[str]:
    """Serves two pages in this process, which the web agent's tool can reach and its sandbox cannot."""

    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host, port = server.server_address[:2]
            pages = {
                "/": f"Welcome! Our figures are at http://{host!s}:{port}/figures",
                "/figures": f"Visitors in May: {visitors}",
            }
            found = pages.get(self.path)
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write((found or "no such page").encode())

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


def main() -> None:
    visitors = secrets.randbelow(90_000) + 10_000
    with web_site(visitors) as site:
        per_day = manager_and_web_agent(site)
    print(f"Visitors per day: {per_day}, which is", "right" if per_day == round(visitors / 31, 1) else "wrong")
    print("The heading:", manager_and_local_worker())


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
