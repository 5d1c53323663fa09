"""A step shows what it drew, however it ended; a figure that can't be drawn costs it a line on stderr and no more."""

from __future__ import annotations

from tests.contract.harness import Harness
from tests.contract.marks import promise

_PLOT = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\n"
_BAD_FORMATTER = """
import matplotlib.pyplot as plt
def broken(value, position):
    {body}
plt.plot([1])
plt.gca().xaxis.set_major_formatter(broken)
"""
_SLEEP = "import time\n    time.sleep(60)"
_UNDRAWABLE = {
    "mathtext": "import matplotlib.pyplot as plt\nplt.title(r'$\\frac{1}{$')\nplt.plot([1])",
    "formatter": _BAD_FORMATTER.format(body="raise ValueError('no such tick')"),
    "exit": _BAD_FORMATTER.format(body="raise SystemExit(3)"),
    "process exit": _BAD_FORMATTER.format(body="import os\n    os._exit(3)"),
    "figsize": "import matplotlib.pyplot as plt\nplt.figure(figsize=(600, 600))\nplt.plot([1])",
    "far text": "import matplotlib.pyplot as plt\nplt.plot([1])\nplt.text(1e6, 1e6, 'far')",
    "closing": _PLOT + "def fail(event):\n    raise ValueError('no')\n"
    "plt.gcf().canvas.mpl_connect('close_event', fail)\nplt.title('$\\\\frac$')",
}


@promise("stream-images")
async def test_a_figure_that_cannot_be_drawn_fails_no_step(harness: Harness) -> None:
    session = await harness.session()
    for kind, code in _UNDRAWABLE.items():
        drew = await harness.run(session, code + "\nx = 41")
        assert (drew.outcome, drew.images, drew.state) == ("succeeded", [], "kept"), kind
        assert drew.stderr.count("is not shown: ") == 1, drew.stderr
        later = await harness.run(session, "x + 1")
        assert (later.outcome, later.output, later.stderr) == ("succeeded", 42, ""), kind


@promise("stream-images")
async def test_the_time_of_drawing_is_not_the_programs(harness: Harness) -> None:
    """A slow draw costs neither the step nor the variables; what was drawn before it is shown."""
    session = await harness.session()
    code = _PLOT + "plt.figure()\n" + _BAD_FORMATTER.format(body=_SLEEP) + "x = 41"
    await harness.run(session, "import matplotlib.pyplot")
    drew = await harness.run(session, code, wall_time_s=3.0)
    assert (drew.outcome, len(drew.images), drew.state) == ("succeeded", 1, "kept")
    assert "is not shown: drawing took longer than" in drew.stderr
    assert (await harness.run(session, "x + 1", wall_time_s=3.0)).output == 42


@promise("stream-images")
async def test_time_for_drawing_is_no_time_for_the_program(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "import matplotlib.pyplot")
    run = await harness.run(session, _PLOT + "plt.show()\nimport time\ntime.sleep(60)", wall_time_s=2.0)
    assert (run.outcome, len(run.images)) == ("timeout", 1)
    assert run.ended.usage.wall_time_s < 5.0


@promise("stream-images")
async def test_what_show_cannot_draw_does_not_end_the_program(harness: Harness) -> None:
    session = await harness.session()
    run = await harness.run(session, _UNDRAWABLE["mathtext"] + "\nplt.show()\nprint('on')")
    assert (run.outcome, run.stdout) == ("succeeded", "on\n")
    assert "[a figure is not shown: ValueError" in run.stderr


_CAUSES = {
    "exception": "1/0",
    "exited": "import sys\nsys.exit(2)",
    "operation_limit": "while True: pass",
    "timeout": "import time\ntime.sleep(60)",
}


@promise("stream-images")
async def test_a_step_shows_what_it_drew_however_it_ended(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "import matplotlib.pyplot")
    for outcome, code in _CAUSES.items():
        failed = await harness.run(session, _PLOT + code, wall_time_s=4.0, operations=1_000_000)
        assert (failed.outcome, len(failed.images), failed.state) == (outcome, 1, "kept")
        later = await harness.run(session, "print('x')")
        assert (later.stdout, later.images) == ("x\n", [])


@promise("stream-images")
async def test_figures_are_drawn_where_the_program_may_start_no_process_and_write_no_file(harness: Harness) -> None:
    session = await harness.session_under("language.dangerous_functions = false\nlanguage.file_writing = false")
    run = await harness.run(session, _PLOT + "fig = plt.gcf()\nfig")
    assert (run.outcome, len(run.images), run.stderr) == ("succeeded", 1, "")
    assert run.output.width > 100
