"""Objects that show themselves as in notebooks: their text is printed, and their display data comes as it is."""

from __future__ import annotations

from executor_api.displays import DISPLAY_TYPE, unpack
from executor_api.limits import DISPLAY_BYTES_MAX
from executor_api.values import OpaqueValue
from executor_server.core.model import Image
from tests.contract.harness import MIB, Harness, Transcript
from tests.contract.marks import promise

_RICH = """
class Rich:
    def __init__(self, **shows): self.shows = shows
    def __repr__(self): return "<rich>"
    def _repr_html_(self): return self.shows.get("html")
    def _repr_svg_(self): return self.shows.get("svg")
    def _repr_mimebundle_(self, include=None, exclude=None): return self.shows.get("bundle")
"""


def displays_of(run: Transcript) -> list[dict[str, str]]:
    kinds = [event.kind for event in run.events if isinstance(event.kind, Image)]
    return [unpack(run.bytes_of(kind.data)) for kind in kinds if kind.mime_type == DISPLAY_TYPE]


@promise("stream-images")
async def test_an_object_that_shows_itself_gives_its_text_and_its_display_data(harness: Harness) -> None:
    session = await harness.session()
    bundle = "{'text/plain': 'a plot', 'application/vnd.x+json': {'a': [1]}, 'text/html': '<p>'}"
    run = await harness.run(
        session, f"{_RICH}\nprint(1)\ndisplay(Rich(html='<b>', svg='<svg>'), Rich(bundle={bundle}))"
    )
    assert (run.outcome, run.stdout, run.stderr) == ("succeeded", "1\n<rich>\na plot\n", "")
    assert displays_of(run) == [
        {"text/html": "<b>", "image/svg+xml": "<svg>"},
        {"text/html": "<p>", "text/plain": "a plot", "application/vnd.x+json": '{"a": [1]}'},
    ]


@promise("stream-images")
async def test_display_data_that_fails_or_is_too_large_fails_no_step(harness: Harness) -> None:
    session = await harness.session()
    code = f"""{_RICH}
class Failing(Rich):
    def _repr_html_(self): raise ValueError("no page")
    def _repr_png_(self): return "a"  # no Base64
    def _repr_svg_(self): return "x" * {DISPLAY_BYTES_MAX}
display(Failing(bundle={{"text/latex": "$x$", "no type": "x", "application/json": {{1: {{2}}}}}}), {{1: 2}})
Failing()"""
    run = await harness.run(session, code)
    assert (run.outcome, run.stdout) == ("succeeded", "<rich>\n{1: 2}\n")
    assert displays_of(run) == [{"text/latex": "$x$"}]
    assert "the _repr_html_ of a Failing is not shown: ValueError: no page" in run.stderr
    assert "image/png is not shown" in run.stderr
    assert isinstance(run.output, OpaqueValue) and run.output.display == {}


@promise("stream-images")
async def test_a_figure_as_a_value_is_an_image(harness: Harness) -> None:
    session = await harness.session(memory_bytes=1024 * MIB, wall_time_s=60)
    for value in (
        "fig",
        "[fig]",
        "ax",
        "__import__('seaborn').displot([1, 2, 3])",
        "import seaborn.objects as so\nso.Plot(x=[1, 2], y=[1, 2]).add(so.Line())",
    ):
        run = await harness.run(session, f"import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\n{value}")
        shown = run.output[0] if isinstance(run.output, list) else run.output
        assert not isinstance(shown, OpaqueValue) and shown is not None, (value, run.stderr + run.message)
        assert shown.width > 100


@promise("stream-images")
async def test_a_figure_of_many_axes_is_drawn_once_for_all_of_them(harness: Harness) -> None:
    session = await harness.session(memory_bytes=1024 * MIB, wall_time_s=60)
    run = await harness.run(session, "import matplotlib.pyplot as plt\nfig, axes = plt.subplots(2, 1)\nlist(axes)")
    assert run.output[0].width > 100
    assert all(isinstance(each, OpaqueValue) for each in run.output[1:]), "its other axes are not drawn again"


@promise("stream-images")
async def test_a_figure_as_an_answer_is_an_image(harness: Harness) -> None:
    session = await harness.session()
    answers: list[object] = []
    code = "import matplotlib.pyplot as plt\nplt.plot([1])\nanswer(plt.gcf())"
    await harness.run_with_tools(session, code, {"answer": answers.append}, final="answer")
    assert answers[0].width > 100  # type: ignore[attr-defined]


@promise("stream-images")
async def test_plots_of_plotly_are_display_data_with_a_page(harness: Harness) -> None:
    session = await harness.session(memory_bytes=1024 * MIB)
    code = "import plotly.express as px\nfig = px.line(x=[1, 2], y=[3, 4])\nfig.show()\nfig.show('browser')\nfig"
    run = await harness.run(session, code)
    assert (run.outcome, run.stderr) == ("succeeded", "")
    assert [sorted(data) for data in displays_of(run)] == [["application/vnd.plotly.v1+json", "text/html"]] * 2
    assert {"application/vnd.plotly.v1+json", "text/html"} == run.output.display.keys()
    assert [artifact.path for artifact in run.ended.artifacts] == ["figure-1.html"]


@promise("stream-images")
async def test_images_show_themselves_where_pillow_would_open_a_window(harness: Harness) -> None:
    session = await harness.session()
    run = await harness.run(session, "from PIL import Image\nImage.new('RGB', (3, 2)).show(title='x')")
    assert (run.outcome, len(run.images)) == ("succeeded", 1)


@promise("stream-images")
async def test_what_an_object_shows_stops_at_the_number_that_an_execution_has(harness: Harness) -> None:
    session = await harness.session()
    run = await harness.run(session, f"{_RICH}\nfor _ in range(300): display(Rich(html='<b>'))")
    assert (run.outcome, len(displays_of(run)), run.stdout.count("<rich>")) == ("succeeded", 256, 300)
    assert run.stderr.count("display data is not shown") == 44
