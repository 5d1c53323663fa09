"""A browser in a Docker sandbox, seen from the client: pages, screenshots, tools, interrupts, losses."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
from smolagents import ActionStep
from smolagents.memory import FinalAnswerStep
from smolagents.monitoring import Timing

from executor_client import ExecutionResult, Outcome, VariablesState
from executor_client.smolagents import CodeExecutionError, RemoteExecutor
from executor_client.smolagents.browser import BROWSER_IMPORTS, BROWSER_TOOLS, browser_settings, screenshots
from tests.support.backends import require_image
from tests.support.browser import see
from tests.support.daemon import Daemon, daemon_of
from tests.support.polling import eventually

# Pages as files of the workspace, and a port that takes connections and never answers.
PAGES = """
import socket
from pathlib import Path as _Path

def page(name, body):
    _Path(name).write_text(f"<!doctype html><meta charset=utf-8><title>{name}</title><body>{body}")
    return _Path(name).absolute().as_uri()

first = page("first.html", "<h1>First</h1><p>Grüezi</p><a href=second.html>Onwards</a>")
second = page("second.html", "<h1>Second</h1>" + "<p>filler</p>" * 200 + "<p id=deep>It's a \\"deep\\" <b>find</b></p>"
    + "<p>filler</p>" * 200 + "<p>It's a \\"deep\\" find</p>")
modal = page("modal.html", "<dialog id=d>Subscribe!</dialog><script>d.showModal()</script>")
red = page("red.html", "<style>body{background:rgb(255,0,0)}</style>")

deaf = socket.create_server(("127.0.0.1", 0))
hanging = f"http://127.0.0.1:{deaf.getsockname()[1]}/"
"""
PROCESSES = """
from pathlib import Path as _Path
def processes(name):
    found = []
    for each in _Path("/proc").glob("[0-9]*"):
        try:
            command = (each / "cmdline").read_text().split(chr(0))
        except OSError:
            continue
        if command[0].endswith("/" + name) and not any(part.startswith("--type=") for part in command):
            found.append(each.name)
    return sorted(found)
"""
LIMITS = {"wall_time_s": 30.0, "operations": 10**12}
# Seconds of an execution that is to hit its limit: the prelude has as much time as the session's other executions.
SHORT_S = 1.0


@pytest.fixture(scope="module")
def docker_daemon() -> Iterator[Daemon]:
    require_image("browser")
    # A ready sandbox would be the next test's leftover.
    with daemon_of("[pool]\nsize = 0\n", "--backend", "docker") as running:
        yield running


def make_executor(daemon: Daemon, **settings: Any) -> RemoteExecutor:
    given = browser_settings(prelude=PAGES + PROCESSES, limits=LIMITS, **settings)
    return RemoteExecutor([*BROWSER_IMPORTS, "socket", "pathlib", "time"], **given, **daemon.access)


@pytest.fixture(scope="module")
def shared(docker_daemon: Daemon) -> Iterator[RemoteExecutor]:
    with make_executor(docker_daemon) as executor:
        executor.send_tools({each.name: each for each in BROWSER_TOOLS})
        yield executor


@pytest.fixture
def browser(shared: RemoteExecutor) -> RemoteExecutor:
    """An executor whose browser shows the first page, in a session that the tests share."""
    shared("go_to(first)")
    return shared


@pytest.fixture
def fresh(docker_daemon: Daemon) -> Iterator[RemoteExecutor]:
    """An executor of the test's own."""
    with make_executor(docker_daemon) as executor:
        yield executor


def shot(executor: RemoteExecutor, older: list[ActionStep] | None = None, **options: Any) -> ActionStep:
    """A step as the callback leaves it."""
    step = ActionStep(step_number=1, timing=Timing(start_time=0.0), observations="Execution logs:\n")
    agent = SimpleNamespace(python_executor=executor, memory=SimpleNamespace(steps=older or []))
    screenshots(settle_s=0.0, **options)(step, agent=agent)
    return step


# ---------------------------------------------------------------------------------------------------------------------
# Pages and pictures


def test_before_the_first_page_there_is_no_screenshot(fresh: RemoteExecutor) -> None:
    fresh("1")
    assert fresh.page() is None and fresh.screenshot() is None
    step = shot(fresh)
    assert (step.observations_images, step.observations) == (None, "Execution logs:\n")


def test_a_page_is_seen_with_its_address(browser: RemoteExecutor) -> None:
    page = browser.page()
    assert page is not None and page.url.startswith("file://") and page.url.endswith("/first.html")
    width, height = page.image.size
    assert width == 1000 and 1000 < height <= 1350
    assert len(page.image.convert("L").getcolors() or ()) > 2  # it has text
    browser("go_to(red)")

    def is_red() -> bool:
        picture = browser.screenshot()
        return isinstance(picture, PIL.Image.Image) and picture.convert("RGB").getpixel((500, 500)) == (255, 0, 0)

    assert eventually(is_red)


def test_after_a_step_the_model_sees_the_page_and_its_address(browser: RemoteExecutor) -> None:
    older = [shot(browser) for _ in range(3)]
    step = shot(browser, older, max_side_px=300)
    assert [image.size[1] for image in step.observations_images] == [300]
    assert step.observations.startswith("Execution logs:\nCurrent url: file://")
    assert [each.observations_images is not None for each in older] == [False, False, True]


def test_other_steps_and_agents_without_our_executor_are_let_pass(browser: RemoteExecutor) -> None:
    screenshots()(FinalAnswerStep(output=1), agent=SimpleNamespace(python_executor=browser))
    step = ActionStep(step_number=1, timing=Timing(start_time=0.0))
    screenshots()(step, agent=SimpleNamespace(memory=SimpleNamespace(steps=[])))
    assert step.observations is None


def test_an_open_alert_is_told_and_left_to_the_agent(browser: RemoteExecutor) -> None:
    browser("get_driver().execute_script('setTimeout(() => alert(\"Are you there?\"), 0)')")
    browser("wait_until(Alert().exists)")
    step = shot(browser)
    assert step.observations_images is None
    assert "There is no screenshot: " in step.observations and "Are you there?" in step.observations
    assert browser("Alert().text").output == "Are you there?"
    assert browser("close_popups()").output == "Dismissed an alert."
    assert shot(browser).observations_images is not None


# ---------------------------------------------------------------------------------------------------------------------
# Tools, which are of no use here: only the sandbox has helium and a driver


def test_text_is_found_and_scrolled_to(browser: RemoteExecutor) -> None:
    browser("go_to(second)\nscrolled = lambda: get_driver().execute_script('return window.scrollY')")
    found = browser("""first_place, text = scrolled(), "It's a \\"deep\\""\nsearch_item_ctrl_f(text)""")
    assert found.output == "Found 2 matches for 'It\\'s a \"deep\"'. Scrolled to match number 1."
    places = browser("[first_place, scrolled(), search_item_ctrl_f(text, nth_result=2) and scrolled()]").output
    assert places == sorted(set(places)) and places[0] == 0


@pytest.mark.parametrize(("call", "message"), [("'nowhere'", "0 matches"), ("'filler', 0", "no match number 0")])
def test_text_that_is_not_there_is_told(browser: RemoteExecutor, call: str, message: str) -> None:
    browser("go_to(second)")
    with pytest.raises(CodeExecutionError, match=f"ValueError: there is .*{message}"):
        browser(f"search_item_ctrl_f({call})")


def test_a_scripts_text_is_not_the_pages(browser: RemoteExecutor) -> None:
    with pytest.raises(CodeExecutionError, match="0 matches"):
        browser("go_to(modal)\nsearch_item_ctrl_f('showModal')")


def test_a_modal_window_is_closed(browser: RemoteExecutor) -> None:
    is_open = "get_driver().execute_script('return d.open')"
    assert browser(f"go_to(modal)\n{is_open}").output is True
    assert "Escape" in browser("close_popups()").output
    assert see(browser, "0", is_open, False).value is False


def test_one_goes_back(browser: RemoteExecutor) -> None:
    assert see(browser, "go_to(first)\nclick('Onwards')", "get_driver().title", "second.html").value == "second.html"
    assert see(browser, "go_back()", "get_driver().title", "first.html").value == "first.html"


# ---------------------------------------------------------------------------------------------------------------------
# Interrupts and replacements


def run_out_of_time(executor: RemoteExecutor, code: str) -> ExecutionResult:
    """Runs code as a step does, with less time."""
    result = executor._lease.session().execute(code, limits={"wall_time_s": SHORT_S})
    assert result.outcome is Outcome.TIMEOUT
    return result


def test_a_timeout_leaves_the_browser_and_its_page(browser: RemoteExecutor) -> None:
    before = browser("kept = 1\nprocesses('chromium'), processes('chromedriver')").output
    assert run_out_of_time(browser, "while True:\n    pass").state is VariablesState.KEPT
    assert browser("kept, Text('Grüezi').exists()").output == (1, True)
    assert browser("processes('chromium'), processes('chromedriver')").output == before
    assert [len(each) for each in before] == [1, 1]


def test_a_page_that_never_loads_costs_time_and_nothing_else(browser: RemoteExecutor) -> None:
    browser("kept = 1\nget_driver().set_page_load_timeout(10.0)")
    assert run_out_of_time(browser, "go_to(hanging)").state is VariablesState.KEPT
    assert "There is no screenshot: " in str(shot(browser, timeout_s=0.3).observations)
    # The driver still waits for the page. When it has given up, everything is as it was.
    assert browser.page() is not None
    assert browser("go_to(second)\nkept, Text('Second').exists()").output == (1, True)
    with pytest.raises(CodeExecutionError, match="TimeoutException"):
        browser("get_driver().set_page_load_timeout(0.5)\ngo_to(hanging)")


# ---------------------------------------------------------------------------------------------------------------------
# The example
