"""An agent that looks at web pages: smolagents' vision browser, with the browser in the sandbox. Needs Docker.

The pages are a little shop outside of the sandbox. The policy names its host, so Chromium reaches that and no other;
the agent learns this when it tries another first. Only the language model is replaced, by a script (scripted.py) that
looks at the screenshots. To order a spare part it needs a serial number, which is on the pages as text, and the
colour of a lamp, which is there as pixels; both are random in each run. The screenshots are saved in demo-output/.
Run `make images` once before.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image
from outside import NoAddress, Site, served
from own_daemon import DaemonFailure, own_daemon
from rich.console import Console
from scripted import Reply, ScriptedModel
from smolagents import ActionStep, ChatMessage
from smolagents.models import MessageRole

from executor_client.smolagents import CodeAgent
from executor_client.smolagents.browser import (
    BROWSER_IMPORTS,
    BROWSER_INSTRUCTIONS,
    BROWSER_TOOLS,
    browser_settings,
    save_screenshot,
)

OUTPUT_DIR = Path("demo-output")
LAMPS = {"red": (208, 0, 0), "green": (0, 144, 0), "blue": (0, 0, 208), "violet": (144, 0, 144)}
# Fewer pixels of a colour may be the edge of a letter, not the lamp.
LAMP_PIXELS_MIN = 400

console = Console(highlight=False)

# ---------------------------------------------------------------------------------------------------------------------
# The shop


@dataclass(frozen=True)
class Shop:
    """The shop of one run, with the values that the agent must find."""

    serial: str
    lamp: str
    receipt: str

    @classmethod
    def random(cls) -> Shop:
        return cls(
            serial=f"GP-{secrets.token_hex(3).upper()}",
            lamp=secrets.choice(sorted(LAMPS)),
            receipt=f"R-{secrets.randbelow(900_000) + 100_000}",
        )

    def pages(self) -> dict[str, str]:
        """Returns the pages by file name."""
        parts = [f"<p>Kiln shelf no. {number}</p>" for number in range(1, 121)]
        parts[86] = f"""<p><a href="pump.html">Glaze pump</a> In use: <canvas id="lamp" width="60" height="60"></canvas>
            <script>
              const drawing = document.getElementById("lamp").getContext("2d")
              drawing.fillStyle = "rgb{LAMPS[self.lamp]}"
              drawing.fillRect(0, 0, 60, 60)
            </script>"""
        bodies = {
            "index.html": """<h1>Kiln &amp; Clay</h1><p>Everything for the potter.</p>
                <a href="parts.html">Spare parts</a> | <a href="order.html">Order form</a>
                <dialog id="popup"><h2>Our newsletter</h2><p>News from the kiln, every single day!</p></dialog>
                <script>
                  if (!sessionStorage.seen) document.getElementById("popup").showModal()
                  sessionStorage.seen = true
                </script>""",
            "parts.html": "<h1>Spare parts</h1><p>The lamp shows whether a part is in use.</p>" + "".join(parts),
            "pump.html": f"<h1>Glaze pump</h1><p>Serial number: <b id='serial'>{self.serial}</b></p>",
            "order.html": f"""<h1>Order form</h1>
                <p><label>Serial number <input id="serial"></label>
                <p><label>Colour of the lamp <input id="lamp"></label>
                <p><button onclick="order()">Send</button>
                <p id="answer"></p>
                <script>
                  function order() {{
                    const value = name => document.getElementById(name).value
                    const right = value("serial") === "{self.serial}" && value("lamp") === "{self.lamp}"
                    const said = right ? "Thank you! Your receipt is {self.receipt}." : "There is no such part."
                    document.getElementById("answer").textContent = said
                  }}
                </script>""",
        }
        head = "<!doctype html><meta charset='utf-8'><link rel='icon' href='data:,'>"
        style = "<style>body { font: 20px sans-serif; margin: 40px } dialog { border: 8px solid orange }</style>"
        return {f"/{name}": f"{head}<title>{name}</title>{style}{body}" for name, body in bodies.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The language model


class SeeingModel(ScriptedModel):
    """A scripted model that sees one thing, the lamp on the newest screenshot, and adds it to its messages."""

    def generate(self, messages: Sequence[Any], *args: Any, **kwargs: Any) -> ChatMessage:
        contents = [message.content for message in messages if isinstance(message.content, list)]
        images = [part["image"] for content in contents for part in content if part["type"] == "image"]
        seen = f"I see a {_lamp(images[-1])} lamp." if images else "I see nothing."
        thought = ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": seen}])
        return super().generate([*messages, thought], *args, **kwargs)


def _lamp(image: PIL.Image.Image) -> str:
    """Returns the colour of the lamp on the image, or "dark"."""
    rgb = image.convert("RGB")
    counts = {colour: count for count, colour in rgb.getcolors(maxcolors=rgb.width * rgb.height) or ()}
    return next((name for name, colour in LAMPS.items() if counts.get(colour, 0) >= LAMP_PIXELS_MIN), "dark")


TASK = "Find a shop for potters, and order a glaze pump. Answer with the receipt."

SCRIPT = [
    Reply(thought="There is one that I know.", code="go_to('http://everything-for-potters.example/')"),
    Reply(
        thought="It is refused, and I may go to <<shop>>.",
        expects=["network: everything-for-potters.example:80 is not allowed for this session"],
        reads={"shop": r"allowed: (\S+)"},
        code="go_to('http://<<shop>>/index.html')",
    ),
    Reply(
        thought="Something about a newsletter is in front of the page.",
        expects=["/index.html", "I see a dark lamp."],
        code="""
print("In front before:", Text("Our newsletter").exists())
print(close_popups())
wait_until(lambda: not Text("Our newsletter").exists())
print("In front after:", Text("Our newsletter").exists())
""",
    ),
    Reply(
        thought="It is gone. I look for the pump, on what may be a long list.",
        expects=["In front before: True", "In front after: False"],
        code="""
click("Spare parts")
print(search_item_ctrl_f("Glaze pump"))
""",
    ),
    Reply(
        thought="Beside it is a lamp; it is <<lamp>>. What is the pump's number?",
        expects=["Found 1 matches", "/parts.html"],
        reads={"lamp": r"I see a (red|green|blue|violet) lamp"},
        code="""
lamp = "<<lamp>>"
click("Glaze pump")
print(S("#serial").web_element.text)
""",
    ),
    Reply(
        thought="The number is <<serial>>. Back to the list, and to the start.",
        expects=["/pump.html"],
        reads={"serial": r"(GP-[0-9A-F]{6})"},
        code="""
serial = "<<serial>>"
go_back()
print("Back on", get_driver().title)
go_back()
""",
    ),
    Reply(
        thought="Now I can order it.",
        expects=["Back on parts.html", "/index.html"],
        code="""
click("Order form")
write(serial, into="Serial number")
write(lamp, into="Colour of the lamp")
click("Send")
print(S("#answer").web_element.text)
""",
    ),
    Reply(
        thought="The shop has taken the order.",
        expects=["Thank you!", "/order.html"],
        reads={"receipt": r"Your receipt is (R-\d{6})"},
        code="""final_answer("<<receipt>>")""",
    ),
]

# ---------------------------------------------------------------------------------------------------------------------
# The run


def policy(site: Site) -> str:
    return f'default = "shoppers"\n[profiles.shoppers.network]\nallowed = ["{site.host}"]\n'


def run_agent(address: str, shop: Shop, site: Site) -> list[str]:
    """Runs the agent in a sandbox with a browser; returns the problems with the result."""
    saved = ScreenshotFolder(OUTPUT_DIR)
    agent = CodeAgent(
        tools=[*BROWSER_TOOLS],
        model=SeeingModel(SCRIPT, "seeing model"),
        additional_authorized_imports=BROWSER_IMPORTS,
        executor_kwargs=browser_settings(address=address, network=[site.host]),
        instructions=BROWSER_INSTRUCTIONS,
        step_callbacks=[save_screenshot, saved.after_step],
        max_steps=len(SCRIPT),
    )
    with agent:
        answer = agent.run(TASK)

    problems = []
    if answer != shop.receipt:
        problems.append(f"the answer is {answer!r}, not {shop.receipt!r}")
    if not agent.model.finished:
        problems.append("the script was not played to its end")
    if len(saved.paths) != len(SCRIPT):
        problems.append(f"there are {len(saved.paths)} screenshots of {len(SCRIPT)} steps")
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    if [step.observations_images is not None for step in steps[-3:]] != [False, True, True]:
        problems.append("memory does not hold the last two screenshots alone")
    console.print(f"\nScreenshots are in {OUTPUT_DIR.resolve()}: {', '.join(path.name for path in saved.paths)}")
    return problems


class ScreenshotFolder:
    """Saves the newest screenshot of each step."""

    def __init__(self, folder: Path) -> None:
        self.paths: list[Path] = []
        self._folder = folder
        folder.mkdir(exist_ok=True)
        for old in folder.glob("browser-step-*.png"):
            old.unlink()

    def after_step(self, step: ActionStep) -> None:
        if step.observations_images:
            path = self._folder / f"browser-step-{step.step_number}.png"
            step.observations_images[-1].save(path)
            self.paths.append(path)


def main() -> int:
    shop = Shop.random()
    try:
        with (
            served(shop.pages()) as site,
            own_daemon("docker", configuration=site.configuration, policy=policy(site)) as address,
        ):
            problems = run_agent(address, shop, site)
    except (DaemonFailure, NoAddress) as failure:
        problems = [str(failure)]
    for problem in problems:
        console.print(f"FAILED: {problem}", markup=False, style="bold red")
    if not problems:
        console.print("The agent found its way through the shop.", style="bold green")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
