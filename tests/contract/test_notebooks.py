"""Magics, shell commands and IPython.display, as people and models know them from notebooks."""

from __future__ import annotations

import pytest

from executor_server.core.model import Image
from tests.contract.harness import MIB, Harness
from tests.contract.marks import promise
from tests.contract.test_displays import displays_of

pytestmark = promise("run-main")


@pytest.mark.parametrize(
    ("code", "output", "stdout"),
    [
        ("%matplotlib inline\n%load_ext autoreload\n1", 1, ""),
        ("y, n = 0.5, 'a'\n!echo {y:.2f} {n!r:>5} {1,2}", None, "0.50 a 1 2\n"),
        ('%%bash -s b\necho "$1"', None, "b\n"),
        ("!echo a; echo $((1 + 1)) {1..3}", None, "a\n2 1 2 3\n"),
        (
            "name = 'b c'\nif name:\n    !A=e; echo {name.upper()} $name {nothing} $A {{x,y}} \\\n    d",
            None,
            "B C b c {nothing} e x y d\n",
        ),
        ("lines = !printf 'a\\nb'\nlines", ["a", "b"], ""),
        ('%%bash\nfor i in 1 2; do\n  echo "don\'t $i"\ndone', None, "don't 1\ndon't 2\n"),
        ("%%writefile a.py\nx = '%d' % 3\n", None, "Written: a.py\n"),
        ("%env A_B=c\n!echo $A_B\nx = %env A_B\nx", "c", "c\n"),
        ("import os\n%cd /tmp\nos.getcwd()", "/tmp", ""),
        ("import os\nd = '/tmp'\n%cd {d}\n%env A_C=$d\n(os.getcwd(), os.environ['A_C'])", ("/tmp", "/tmp"), ""),
        ("def f(x):\n    'Doc.'\nf?", None, "f(x)\nDoc.\n"),
        ("text = '''\n!ls\n%time\n'''\n!true\nlen(text)", 11, ""),
        ("get_ipython().run_line_magic('matplotlib', 'inline')\nget_ipython().system('echo 1')", None, "1\n"),
    ],
)
async def test_what_notebooks_have_works(harness: Harness, code: str, output: object, stdout: str) -> None:
    session = await harness.session(imports=("os", "subprocess"))
    run = await harness.run(session, code)
    assert run.outcome == "succeeded", run.ended.error
    assert run.output == output
    assert run.stdout == stdout


async def test_times_are_printed_and_the_value_stays(harness: Harness) -> None:
    session = await harness.session()
    timed = "sum(range(9))"
    for code in (f"%time x = {timed}\nx", f"%time {timed}", f"%%time\nx = {timed}\nx", f"x = %time {timed}\nx"):
        run = await harness.run(session, code)
        assert (run.outcome, run.output) == ("succeeded", 36), (code, run.ended.error)
        assert run.stdout.startswith("CPU times: total: ") and run.stdout.count("\nWall time: ") == 1


async def test_what_timeit_repeats_counts_and_is_bounded(harness: Harness) -> None:
    session = await harness.session()
    run = await harness.run(session, "turns = 0\n%timeit -n 7 -r 3 turns += 1\nturns")
    assert (run.outcome, run.output) == ("succeeded", 21), run.ended.error
    assert "per loop (best of 3 runs, 7 loops each)" in run.stdout
    run = await harness.run(session, "%timeit -n0 -r0 turns += 1\nturns")
    assert (run.outcome, run.output) == ("succeeded", 22), run.ended.error
    run = await harness.run(session, "%timeit turns += 1", operations=1_000)
    assert run.outcome == "operation_limit"


COMMANDS = {
    "subprocess": ("!ls", "x = !ls", "%%bash\nls", "%ls", "get_ipython().system('ls')"),
    "os": ("%cd /tmp", "%env A=b"),
}


@pytest.mark.parametrize("preset", ["guarded", "strict"])
async def test_a_command_is_refused_as_its_module_is(harness: Harness, preset: str) -> None:
    session = await harness.session_under(f'language.preset = "{preset}"', imports=("math",))
    for module, commands in COMMANDS.items():
        refused = await harness.run(session, f"import {module}")
        for code in commands:
            run = await harness.run(session, code)
            assert (run.outcome, run.message) == ("import_denied", refused.message), code


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("dangerous_functions", "!ls"),
        ("open", "%%writefile a\nb"),
        ("file_writing", "%%writefile a\nb"),
        ("open", "from IPython.display import Image\nImage('a.png')"),
        ("dynamic_code", "get_ipython().run_line_magic('time', 'x = 1')"),
        ("dynamic_code", "!echo {1 + 1}"),
        ("dangerous_functions", "get_ipython().os.system('ls')"),
    ],
)
async def test_the_rules_of_the_language_hold_for_what_is_translated(harness: Harness, rule: str, code: str) -> None:
    profile = f"language = {{ {rule} = false }}\n"
    session = await harness.session_under(profile, imports=("os", "subprocess"))
    run = await harness.run(session, code)
    assert run.outcome == "policy_denied" and f"language.{rule}" in run.message, (run.outcome, run.message)


async def test_an_error_shows_the_line_as_it_was_written(harness: Harness) -> None:
    session = await harness.session(imports=("subprocess",))
    run = await harness.run(session, "a = 1\n!echo \\\n  b\n%time c = a / 0\n")
    error = run.ended.error
    assert error is not None and (error.type, error.line) == ("ZeroDivisionError", 4)
    assert "    %time c = a / 0\nZeroDivisionError" in error.traceback


async def test_the_whole_message_of_an_error_can_be_fetched(harness: Harness) -> None:
    session = await harness.session()
    run = await harness.run(session, "raise ValueError('x' * 100_000)")
    assert len(run.message) < 10_000 and run.message.endswith("x…")
    run = await harness.run(session, "len(str(get_ipython().last_exc))")
    assert run.output == 100_000, run.ended.error


async def test_ipython_display_is_there_where_ipython_is_not(harness: Harness) -> None:
    session = await harness.session_under('language.preset = "guarded"', imports=("math",))
    code = """
from IPython.display import HTML, Image, Markdown, clear_output, display
from IPython import get_ipython
import IPython
clear_output(wait=True)
display(HTML("<b>x</b>"), Markdown("*y*"))
with open("a.jpg", "wb") as file:
    file.write(b"\\xff\\xd8")
IPython.display.display(Image(filename="a.jpg"))
get_ipython().run_line_magic("matplotlib", "inline")
HTML("<i>")
"""
    run = await harness.run(session, code)
    assert run.outcome == "succeeded", run.ended.error
    assert run.stdout == "<IPython.core.display.HTML object>\n*y*\n"
    assert [data["text/html"] for data in displays_of(run)[:1]] == ["<b>x</b>"]
    assert [event.kind.mime_type for event in run.events if isinstance(event.kind, Image)][-1] == "image/jpeg"
    assert run.output.display["text/html"] == "<i>"
    denied = await harness.run(session, "import IPython.terminal")
    assert denied.outcome == "exception" and "No module named 'IPython.terminal'" in denied.message
    session = await harness.session_under("imports.denied = ['IPython']\n", imports=("math",))
    assert (await harness.run(session, "import IPython.display")).outcome == "import_denied"


async def test_libraries_find_ipython_and_no_notebook(harness: Harness) -> None:
    session = await harness.session(memory_bytes=1024 * MIB)
    code = "import IPython\nimport matplotlib.pyplot as plt\nplt.plot([1])\nplt.gcf().canvas.manager is not None"
    run = await harness.run(session, code)
    assert (run.outcome, len(run.images)) == ("succeeded", 1), run.ended.error
