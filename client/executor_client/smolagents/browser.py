"""A web browser in the sandbox for an agent that looks at pages: smolagents' vision browser guide, run remotely.

    agent = CodeAgent(
        tools=[*BROWSER_TOOLS],
        model=model,
        additional_authorized_imports=BROWSER_IMPORTS,
        executor_kwargs=browser_settings(),
        step_callbacks=[save_screenshot],
        instructions=BROWSER_INSTRUCTIONS,
    )

The agent's code drives the browser with helium, whose names need no import. After each step the model sees the page.
The session's prelude starts the browser, so it survives an interrupt of the agent's code, and a new interpreter starts
a new browser. The image must have Chromium, its driver, helium and selenium, like `images/browser`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from smolagents import ActionStep, tool

from executor_client import EvaluationError
from executor_client.smolagents.executor import RemoteExecutor
from executor_client.smolagents.images import StepCallback, add_images, add_observation, forget_images

BROWSER_IMAGE = "browser"
BROWSER_IMPORTS = ["helium", "selenium.*"]
WINDOW_PX = (1_000, 1_350)
PAGE_LOAD_TIMEOUT_S = 20.0
KEEP_SCREENSHOTS = 2
SETTLE_S = 0.5
MAX_SIDE_PX = 1_400
REASON_CHARS_MAX = 300

_PRELUDE = """
from helium import *
from selenium.webdriver import ChromeOptions as _ChromeOptions

_options = _ChromeOptions()
_options.add_argument("--window-size={width},{height}")
_options.add_argument("--force-device-scale-factor=1")
_options.add_argument("--disable-pdf-viewer")
# Otherwise the page of a refused address reloads, and can interfere with loading the next page.
_options.add_argument("--disable-auto-reload")
_options.unhandled_prompt_behavior = "ignore"
start_chrome(headless=True, options=_options).set_page_load_timeout({page_load_timeout_s})
del _ChromeOptions, _options
"""

BROWSER_INSTRUCTIONS = """
You drive a web browser with helium. All names of helium are imported, and the browser is running; do not start or kill
one. After each step you see the page's address and a screenshot: so do one thing at a time, and look at the result.

Go to a page, and click elements by their text:
<code>
go_to("https://example.com/shop")
</code>
<code>
click("Top products")
</code>
Click a link with `click(Link("Top products"))`. A missing element raises LookupError; `.exists()` tests for it:
<code>
if Text("Accept cookies?").exists():
    click("I accept")
</code>
Write into a field with `write("text", into="Label of the field")`. Scroll with `scroll_down(num_pixels=1200)` and
`scroll_up(num_pixels=1200)`.

Close pop-ups with the tool `close_popups`, not by clicking their crosses. To find text on a long page, use the tool
`search_item_ctrl_f` instead of listing elements. Go back with the tool `go_back`. Never log in to a page.
"""


def browser_prelude(*, window_px: tuple[int, int] = WINDOW_PX, page_load_timeout_s: float = PAGE_LOAD_TIMEOUT_S) -> str:
    """Returns code for a session's prelude that starts Chrome without a display and imports helium.

    A page that does not load blocks the browser for `page_load_timeout_s`, even after the agent's code was interrupted:
    keep it well below the session's `wall_time_s`. Raises ValueError unless sizes and times are above 0.
    """
    width, height = map(int, window_px)
    if min(width, height) < 1 or not page_load_timeout_s > 0:
        raise ValueError(f"window_px {window_px} and page_load_timeout_s {page_load_timeout_s} must be above 0")
    return _PRELUDE.format(width=width, height=height, page_load_timeout_s=float(page_load_timeout_s))


def browser_settings(
    *,
    prelude: str = "",
    window_px: tuple[int, int] = WINDOW_PX,
    page_load_timeout_s: float = PAGE_LOAD_TIMEOUT_S,
    tool_placement: str | Mapping[str, str] = "host",
    **settings: Any,
) -> dict[str, Any]:
    """Returns the `executor_kwargs` of an agent with a browser: image, prelude, and placement of the browser's tools.

    `prelude` runs after `browser_prelude`, `tool_placement` places the other tools, and `settings` are further
    arguments of `RemoteExecutor`.
    """
    if not isinstance(tool_placement, str):
        tool_placement = {**{each.name: "sandbox" for each in BROWSER_TOOLS}, **tool_placement}
    elif tool_placement == "host":
        tool_placement = {each.name: "sandbox" for each in BROWSER_TOOLS}
    begin = browser_prelude(window_px=window_px, page_load_timeout_s=page_load_timeout_s)
    return {"image": BROWSER_IMAGE, "prelude": begin + prelude, "tool_placement": tool_placement, **settings}


# ---------------------------------------------------------------------------------------------------------------------
# Tools that run in the sandbox. Each has its own imports, because it is shipped alone.


@tool  # type: ignore[untyped-decorator]  # smolagents is untyped
def go_back() -> None:
    """Goes back to the previous page."""
    import helium  # type: ignore[import-not-found]  # it is in the sandbox's image

    helium.get_driver().back()


@tool  # type: ignore[untyped-decorator]  # smolagents is untyped
def close_popups() -> str:
    """Closes the pop-up, modal window or alert that is in front of the page. Cookie banners must be clicked instead."""
    import helium
    from selenium.common.exceptions import NoAlertPresentException  # type: ignore[import-not-found]
    from selenium.webdriver import ActionChains, Keys  # type: ignore[import-not-found]

    driver = helium.get_driver()
    try:
        driver.switch_to.alert.dismiss()
    except NoAlertPresentException:
        ActionChains(driver).send_keys(Keys.ESCAPE).perform()
        return "Pressed Escape, which closes most pop-ups."
    return "Dismissed an alert."


@tool  # type: ignore[untyped-decorator]  # smolagents is untyped
def search_item_ctrl_f(text: str, nth_result: int = 1) -> str:
    """
    Searches for text on the page, as Ctrl + F does, and scrolls to the n-th place where it is found.

    Args:
        text: The text to search for.
        nth_result: Which of the places to scroll to, counted from 1.
    """
    import helium

    # XPath has no escapes: text with both kinds of quotes must be concatenated from pieces.
    quoted = "concat('" + text.replace("'", "', \"'\", '") + "', '')"
    driver = helium.get_driver()
    places = driver.find_elements(
        "xpath", f"//body//*[not(self::script or self::style)][text()[contains(., {quoted})]]"
    )
    if not 1 <= nth_result <= len(places):
        raise ValueError(f"there is no match number {nth_result} of {text!r}: {len(places)} matches are on the page")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'});", places[nth_result - 1])
    return f"Found {len(places)} matches for {text!r}. Scrolled to match number {nth_result}."


BROWSER_TOOLS = (go_back, close_popups, search_item_ctrl_f)

# ---------------------------------------------------------------------------------------------------------------------
# Screenshots for the model


def screenshots(
    *,
    keep_steps: int = KEEP_SCREENSHOTS,
    settle_s: float = SETTLE_S,
    max_side_px: int = MAX_SIDE_PX,
    timeout_s: float | None = None,
) -> StepCallback:
    """Returns a callback for `step_callbacks` that shows the model the browser's page and its address after each step.

    It waits `settle_s` seconds for the page, shrinks the screenshot to `max_side_px` pixels on its longer side, and
    drops the images of all but the last `keep_steps` steps, including this one. Before the first page it does nothing.
    If the screenshot fails (the session is gone, an alert is open, the page does not load), the observation has the
    reason, and the run continues. `timeout_s` limits the screenshot.
    """
    if keep_steps < 1 or max_side_px < 1 or settle_s < 0:
        raise ValueError("keep_steps and max_side_px must be at least 1, and settle_s not below 0")

    def save(memory_step: Any, agent: Any) -> None:
        executor = getattr(agent, "python_executor", None)
        if not (isinstance(memory_step, ActionStep) and isinstance(executor, RemoteExecutor)):
            return
        forget_images(agent, memory_step, keep_steps)
        time.sleep(settle_s)
        try:
            page = executor.page(timeout_s=timeout_s)
        except EvaluationError as error:
            add_observation(memory_step, f"There is no screenshot: {_first_line(error.message)}")
            return
        if page is not None:
            add_images(memory_step, [page.image], max_side_px)
            add_observation(memory_step, f"Current url: {page.url}")

    return save


save_screenshot = screenshots()
"""`screenshots()` with its defaults, under the name that smolagents' guide uses."""


def _first_line(message: str) -> str:
    """Returns the first line, cut: selenium's messages continue with a stack of addresses."""
    line = message.partition("\n")[0]
    return line if len(line) <= REASON_CHARS_MAX else f"{line[:REASON_CHARS_MAX]}..."
