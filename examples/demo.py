"""A code agent that reviews the sales of a coffee roaster, with its code in a sandbox. Run it with `make demo`.

Only the language model is replaced, by a script (scripted.py). smolagents' agent loop, the daemon, the sandbox, the
tools and the limits are real. The script depends on the results of the steps, and the answer is compared with one
computed here, so a wrong result fails the demo. It needs no network, no fixed port and no configuration: the daemon
runs in a directory of its own, and the demo checks at the end that nothing is left of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import PIL.Image
import PIL.ImageDraw
from own_daemon import DOUBLE, DaemonFailure, own_console, own_daemon
from rich.console import Console
from scripted import Reply, ScriptedModel
from smolagents import ActionStep, Tool

from executor_client.smolagents import CodeAgent, RemoteExecutor

OUTPUT_DIR = Path("demo-output")

# For each backend, an image with pandas and matplotlib. The local backend uses the daemon's own environment.
IMAGES = {"local": "base", "docker": "data", "e2b": "base", DOUBLE: "base"}

# The console shows code and output where the profile allows it.
CONSOLE_POLICY = """
default = "default"

[profiles.default]
audit.view = "content"
"""

console = Console(highlight=False)


# ---------------------------------------------------------------------------------------------------------------------
# The task: data, a tool with a secret, an image


def sales_data() -> pd.DataFrame:
    """Returns a year of sales in three regions, in Swiss francs, with a typing error in one quarter."""
    quarters = pd.date_range("2025-01-01", periods=4, freq="QS")
    seasonal = np.array([1.0, 1.25, 0.9, 1.1])
    base = {"north": 12_600, "south": 9_300, "west": 7_800}
    frames = [
        pd.DataFrame({"quarter": quarters, "region": region, "units": (units * seasonal).round().astype(int)})
        for region, units in base.items()
    ]
    sales = pd.concat(frames, ignore_index=True)
    sales["price_chf"] = 14.5
    typo = (sales["region"] == "west") & (sales["quarter"] == "2025-07-01")
    sales.loc[typo, "units"] *= 100
    return sales


def logo() -> PIL.Image.Image:
    """Returns the roaster's logo, whose colour the bars of the chart must have."""
    image = PIL.Image.new("RGB", (96, 96), (111, 78, 55))
    PIL.ImageDraw.Draw(image).ellipse((24, 12, 72, 84), outline=(245, 236, 220), width=6)
    return image


class ExchangeRate(Tool):  # type: ignore[misc]  # smolagents is untyped
    """Plays a paid web service. Its key never leaves this process: the sandbox has only a stub of the tool."""

    name = "exchange_rate"
    description = "Tells how many euros one unit of a currency is worth today."
    inputs = {"currency": {"type": "string", "description": "ISO code, for example CHF"}}  # noqa: RUF012
    output_type = "number"

    def __init__(self, api_key: str) -> None:
        super().__init__()
        self._api_key = api_key
        self.calls = 0

    def forward(self, currency: str) -> float:
        if not self._api_key.startswith("key-"):
            raise PermissionError("the service does not accept this key")
        self.calls += 1
        return {"CHF": 1.05, "USD": 0.88}[currency]


def expected_answer(sales: pd.DataFrame, rate: float) -> dict[str, Any]:
    """Returns the answer that the agent must find, computed without it."""
    units = sales["units"].where(sales["units"] < 100_000, sales["units"] // 100)
    revenue = (units * sales["price_chf"] * rate).groupby(sales["region"]).sum().round(2)
    share = float(revenue.max() / revenue.sum())
    return {"best_region": str(revenue.idxmax()), "revenue_eur": revenue.to_dict(), "share": round(share, 4)}


# ---------------------------------------------------------------------------------------------------------------------
# The script of the language model

AUDITOR_SCRIPT = [
    Reply(
        thought="I look for quarters that are far from the median of their region.",
        code="""
median = data.groupby("region")["units"].transform("median")
odd = data[data["units"] > 10 * median]
for row in odd.itertuples():
    print(f"ODD row={row.Index} region={row.region} units={row.units} median={median[row.Index]:.0f}")
""",
    ),
    Reply(
        thought="One row is about a hundred times too high: two zeros too many.",
        expects=["ODD row=", "region=west"],
        reads={"row": r"ODD row=(\d+)", "units": r"ODD row=\d+ region=west units=(\d+)"},
        code="""final_answer("row <<row>> has <<units>> units, which must be " + str(<<units>> // 100))""",
    ),
]

ANALYST_SCRIPT = [
    Reply(
        thought="First I look at what I was given.",
        code="""
print("shape", sales.shape, "columns", list(sales.columns))
print("logo", logo.size, logo.mode)
revenue_chf = (sales["units"] * sales["price_chf"]).groupby(sales["region"]).sum()
print(revenue_chf.round(0).to_string())
""",
    ),
    Reply(
        thought="West is far above the others, which is strange. I let my colleague check the data.",
        expects=["shape (12, 4)", "logo (96, 96) RGB"],
        code="""
report = auditor(task="Find the typing error in the units of `data`.", additional_args={"data": sales})
print(report)
""",
    ),
    Reply(
        thought="I correct that row.",
        expects=["which must be"],
        reads={"row": r"row (\d+) has", "units": r"must be (\d+)"},
        code="""
print("was", sales.loc[<<row>>, "units"])
sales.loc[<<row>>, "units"] = <<units>>
revenue_chf = (sales["units"] * sales["price_chf"]).groupby(sales["region"]).sum()
best_region = revenue_chf.idxmax()
""",
    ),
    Reply(
        thought="The value of the last assignment says that north leads. Now today's exchange rate, from the web.",
        expects=["Last output from code snippet:\nnorth"],
        code="""
import requests
rate = requests.get("https://rates.example/CHF").json()["EUR"]
""",
    ),
    Reply(
        thought="That is not allowed, but there is a tool. The rate moves all day: I wait for a good one.",
        expects=["Import of requests is not allowed"],
        code="""
import time
rate = exchange_rate("CHF")
print("rate now", rate)
while rate < 1.10:
    time.sleep(0.2)
    rate = exchange_rate("CHF")
""",
    ),
    Reply(
        thought="It did not rise in time. The variables are kept, so I go on with the rate that I have.",
        expects=["rate now 1.05", "exceeded the maximum execution time", "are kept"],
        code="""
revenue_eur = (revenue_chf * rate).round(2)
share = round(float(revenue_eur.max() / revenue_eur.sum()), 4)
print(revenue_eur.to_string())
print(f"{best_region} has {share:.1%} of it")
""",
    ),
    Reply(
        thought="Now a chart, its bars in the colour of the logo.",
        expects=["north has 4"],
        code="""
import matplotlib.pyplot as plt
colour = tuple(part / 255 for part in logo.getpixel((2, 2)))
figure, axes = plt.subplots(figsize=(6, 4))
axes.bar(revenue_eur.index, revenue_eur / 1000, color=colour)
axes.set_ylabel("revenue 2025, thousands of EUR")
axes.set_title(f"{best_region} leads")
plt.show()
print("colour", logo.getpixel((2, 2)))
""",
    ),
    Reply(
        thought="And a card for the intranet: the logo beside the result.",
        expects=["colour (111, 78, 55)"],
        code="""
from PIL import Image, ImageDraw
card = Image.new("RGB", (360, 96), "white")
card.paste(logo, (0, 0))
ImageDraw.Draw(card).text((112, 40), f"{best_region}: EUR {revenue_eur.max():,.0f} ({share:.1%})", fill="black")
card
""",
    ),
    Reply(
        thought="That is all.",
        expects=["PIL.Image.Image"],
        code="""final_answer({"best_region": best_region, "revenue_eur": revenue_eur.to_dict(), "share": share})""",
    ),
]

TASK = (
    "Which region had the highest revenue in 2025, in euros? Check `sales` for errors first. Draw a chart and a card."
)

# ---------------------------------------------------------------------------------------------------------------------
# The run


def run_agents(address: str, image: str) -> list[str]:
    """Runs the analyst and its auditor, each in its own sandbox; returns the problems with the result."""
    settings = {"address": address, "image": image, "limits": {"wall_time_s": 6}}
    imports = ["numpy.*", "pandas.*", "matplotlib.*", "PIL.*"]
    rates = ExchangeRate(api_key="key-1f8a")
    sales = sales_data()
    saved = ImageFolder(OUTPUT_DIR)
    auditor = CodeAgent(
        name="auditor",
        description="Checks tables for errors. Pass the table in additional_args.",
        tools=[],
        model=ScriptedModel(AUDITOR_SCRIPT, "auditor's script"),
        additional_authorized_imports=imports,
        executor_kwargs=settings,
    )
    analyst = CodeAgent(
        name="analyst",
        tools=[rates],
        model=ScriptedModel(ANALYST_SCRIPT, "analyst's script"),
        managed_agents=[auditor],
        additional_authorized_imports=imports,
        executor_kwargs=settings,
        step_callbacks=[saved.after_step],
        max_steps=len(ANALYST_SCRIPT),
    )
    with auditor, analyst:
        answer = analyst.run(TASK, additional_args={"sales": sales, "logo": logo()})

    problems = []
    if answer != (expected := expected_answer(sales, rate=1.05)):
        problems.append(f"the answer is {answer}, not {expected}")
    if not (analyst.model.finished and auditor.model.finished):
        problems.append("the scripts were not played to their ends")
    if rates.calls < 2:
        problems.append(f"the tool ran {rates.calls} times in this process")
    if len(saved.paths) != 2:
        problems.append(f"{len(saved.paths)} images came back, not a chart and a card")
    console.print(f"\nImages are in {OUTPUT_DIR.resolve()}: {', '.join(path.name for path in saved.paths)}")
    return problems


class ImageFolder:
    """Saves the images of each step: its figures, and its value if that is an image."""

    def __init__(self, folder: Path) -> None:
        self.paths: list[Path] = []
        self._folder = folder
        folder.mkdir(exist_ok=True)
        for old in folder.glob("step-*.png"):
            old.unlink()

    def after_step(self, step: ActionStep, agent: CodeAgent) -> None:
        executor = agent.python_executor
        images = list(executor.last_images) if isinstance(executor, RemoteExecutor) else []
        if isinstance(step.action_output, PIL.Image.Image):
            images.append(step.action_output)
        for number, image in enumerate(images, start=1):
            path = self._folder / f"step-{step.step_number}-{number}.png"
            image.save(path)
            self.paths.append(path)


# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def shown() -> Iterator[None]:
    """Runs the console, and waits for a person at the terminal before and after."""

    def wait(text: str) -> None:
        if sys.stdin.isatty():
            input(f"{text} ")

    with own_console() as link:
        print(f"The console is at {link}")
        wait("Open it in a browser, and press Enter to start the agents.")
        yield
        wait("Press Enter to stop the daemon and the console.")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="local", choices=IMAGES, help="the daemon's backend (default: local)")
    parser.add_argument("--console", action="store_true", help="show the agents in the daemon's console, too")
    arguments = parser.parse_args()
    backend = arguments.backend
    started = time.monotonic()
    try:
        with own_daemon(backend, policy=CONSOLE_POLICY if arguments.console else "") as address:
            console.print(f"The daemon runs on {address} ({backend} backend).")
            with shown() if arguments.console else nullcontext():
                problems = run_agents(address, IMAGES[backend])
        console.print("The daemon has stopped; no process, socket or directory of it is left.")
    except DaemonFailure as failure:
        problems = [str(failure)]
    for problem in problems:
        console.print(f"FAILED: {problem}", markup=False, style="bold red")
    if not problems:
        console.print(f"The demo succeeded in {time.monotonic() - started:.0f} s.", style="bold green")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
