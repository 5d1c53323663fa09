"""Probes of what the code may do, and of what the model and the watcher read of it."""

from __future__ import annotations

import io
import time

from rich.console import Console
from smolagents import AgentLogger, LogLevel

from tests.features.observe import NAMESPACE, YES, checked, probe, run, seen, unforeseen
from tests.features.places import Place

REAL_PYTHON = """
from collections import namedtuple
def squares(n):
    for i in range(n):
        yield i * i
*first, last = squares(4)
match last:
    case 9 if (half := last / 2):
        answer = [first, half]
final_answer(answer)
"""


@probe
def imports_are_enforced(place: Place) -> str:
    what = seen(place, "import csv\nfinal_answer('imported')")
    if what.answer == "imported":
        return "no: everything can be imported"
    return YES if "mport of csv is not allowed" in what.said else unforeseen(what)


@probe
def imports_can_be_allowed(place: Place) -> str:
    return checked(seen(place, "import csv\nfinal_answer(csv.QUOTE_ALL)", additional_authorized_imports=["csv"]), 1)


@probe
def real_python(place: Place) -> str:
    what = seen(place, REAL_PYTHON)
    refused = {"InterpreterError": "no: generators, `match`, `:=` and more are refused"}
    return checked(what, [[0, 1, 4], 4.5], refused)


@probe
def math_without_import(place: Place) -> str:
    return checked(seen(place, "final_answer(sqrt(16) + ceil(0.5))"), 5.0, {"NameError": "no: a NameError"})


@probe
def files_of_its_own(place: Place) -> str:
    code = "with open('notes.txt', 'w') as file:\n    _ = file.write('kept')"
    what = seen(place, code, "final_answer(open('notes.txt').read())")
    return checked(what, "kept", {"Forbidden function evaluation: 'open'": "no: there is no `open`"})


@probe
def isolated(place: Place) -> str:
    """The code runs in another process namespace than the agent."""
    what = seen(
        place, "import os\nfinal_answer(os.readlink('/proc/self/ns/pid'))", additional_authorized_imports=["os"]
    )
    if what.answer == NAMESPACE:
        return "no: it runs in the agent's process"
    return checked(what, lambda answer: isinstance(answer, str) and answer.startswith("pid:"))


# ---------------------------------------------------------------------------------------------------------------------
# Logs and errors


@probe
def prints_of_a_failed_step(place: Place) -> str:
    what = seen(place, "print('be' + 'fore')\n1 / 0")
    assert "division by zero" in what.said, what.said
    return YES if "before" in what.said.replace("'be' + 'fore'", "") else "no: they are lost"


@probe
def errors_for_the_model(place: Place) -> str:
    what = seen(place, "numbers = [1]\nnumbers[3]")
    error = str(what.steps[0].error)
    if "\x1b[" in error and "IndexError" in error:
        return "differs: an IPython traceback with colour codes"
    return YES if "Code execution failed at line 'numbers[3]' due to: " in error else unforeseen(what)


@probe
def state_after_a_failed_step(place: Place) -> str:
    return checked(seen(place, "kept = 1\n1 / 0", "final_answer(kept)"), 1)


@probe
def prints_of_libraries(place: Place) -> str:
    allowed = ["pprint"]
    what = seen(place, "import pprint\npprint.pprint(['shown'] * 2)", additional_authorized_imports=allowed)
    return YES if "['shown', 'shown']" in what.said else "no: they go to the agent's own output"


@probe
def logs_are_cut(place: Place) -> str:
    what = seen(place, "print('x' * 100_000)", max_print_outputs_length=1_000)
    length = len(str(what.steps[0].observations))
    return YES if length < 2_000 else "no" if length > 100_000 else unforeseen(what)


class Screen(io.StringIO):
    """Notes when a text is first shown."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self.shown_at: float | None = None

    def write(self, shown: str) -> int:
        if self.shown_at is None and self._text in shown:
            self.shown_at = time.time()
        return len(shown)


@probe
def live_logs(place: Place) -> str:
    """A line is shown before the code ends, which it does a while later."""
    code = "print('li' + 've')\nimport time\ntime.sleep(1)\nfinal_answer(time.time())"
    screen = Screen("live")
    logger = AgentLogger(LogLevel.INFO, Console(file=screen, width=200))
    with place.agent(code, logger=logger, verbosity_level=LogLevel.INFO) as agent:
        what = run(agent)
    if what.answer is None or screen.shown_at is None:
        return unforeseen(what)
    return YES if screen.shown_at < what.answer else "no: at the end of the step"
