"""Variables, the values of steps, final answers."""

from __future__ import annotations

import datetime
import decimal
import enum
import math
from typing import Any

import numpy as np
import pandas as pd
import PIL.Image

from tests.features.observe import REFUSED, YES, Seen, checked, probe, seen, unforeseen
from tests.features.places import Place

UNSAFE = {"Cannot safely serialize": REFUSED}

RICH = """
import datetime, decimal
final_answer({
    "when": datetime.datetime(2026, 1, 2, 3, 4, 5), "price": decimal.Decimal("1.10"), "tags": {"a", "b"},
    "pair": (1, 2), "big": 2 ** 70, "raw": b"xyz", (1, "key"): None, "nan": float("nan"),
})
"""


def _given(place: Place, code: str, **state: Any) -> Seen:
    """A run whose code is given variables."""
    allowed = ["pandas.*", "numpy.*", "PIL.*"]
    return seen(place, code, additional_authorized_imports=allowed, run_options={"additional_args": state})


@probe
def plain_variables(place: Place) -> str:
    state = {"when": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.10"), "tags": {"a", "b"}, "pair": (1, 2)}
    code = "final_answer([str(when), str(price), sorted(tags), pair[1]])"
    return checked(_given(place, code, **state), ["2026-01-02", "1.10", ["a", "b"], 2])


@probe
def dataframe_variable(place: Place) -> str:
    frame = pd.DataFrame({"n": [1, 2, 3], "name": ["a", "b", "c"]})
    return checked(_given(place, "final_answer(int(frame['n'].sum()))", frame=frame), 6, UNSAFE)


@probe
def array_variable(place: Place) -> str:
    return checked(_given(place, "final_answer(float(array.mean()))", array=np.arange(5.0)), 2.0, UNSAFE)


@probe
def image_variable(place: Place) -> str:
    image = PIL.Image.new("RGB", (6, 4), (200, 0, 0))
    code = "final_answer([image.size[0], image.getpixel((0, 0))[0]])"
    return checked(_given(place, code, image=image), [6, 200], UNSAFE)


@probe
def enum_variable(place: Place) -> str:
    colour = enum.Enum("colour", {"RED": 1})
    return checked(_given(place, "final_answer(colour.name)", colour=colour.RED), "RED", UNSAFE)


@probe
def own_object_variable(place: Place) -> str:
    class Basket:
        def __init__(self) -> None:
            self.items = ["apple"]

        def count(self) -> int:
            return len(self.items)

    return checked(_given(place, "final_answer(basket.count())", basket=Basket()), 1, UNSAFE)


# ---------------------------------------------------------------------------------------------------------------------
# What comes back


@probe
def value_of_a_step(place: Place) -> str:
    what = seen(place, "[1, (2, 3)]", "final_answer(0)")
    value = what.steps[0].action_output
    if isinstance(value, str):
        return "differs: its repr, as text" if value == "[1, (2, 3)]" else unforeseen(what)
    return YES if value == [1, (2, 3)] else unforeseen(what)


@probe
def value_of_an_assignment(place: Place) -> str:
    what = seen(place, "x = 3", "final_answer(0)")
    if what.steps[0].action_output is None:
        return "no: only a last expression has a value"
    return YES if what.steps[0].action_output == 3 else unforeseen(what)


@probe
def value_of_an_own_class(place: Place) -> str:
    code = """
class Point:
    def __init__(self, x):
        self.x = x
    def __repr__(self):
        return f"Point({self.x})"
Point(3)
"""
    what = seen(place, code, "final_answer(0)")
    value = what.steps[0].action_output
    if getattr(value, "x", None) == 3:
        return YES
    if str(value) != "Point(3)":
        return unforeseen(what)
    return (
        "differs: its repr, as text"
        if isinstance(value, str)
        else f"differs: an {type(value).__name__}, shows its repr"
    )


@probe
def dataframe_of_a_step(place: Place) -> str:
    code = "import pandas as pd\npd.DataFrame({'n': [1, 2]})"
    what = seen(place, code, "final_answer(0)", additional_authorized_imports=["pandas.*"])
    value = what.steps[0].action_output
    if isinstance(value, str):
        return "differs: its repr, as text"
    return YES if isinstance(value, pd.DataFrame) and list(value["n"]) == [1, 2] else unforeseen(what)


@probe
def plain_answer(place: Place) -> str:
    def right(answer: Any) -> bool:
        nan = answer.pop("nan")
        return math.isnan(nan) and answer == {
            "when": datetime.datetime(2026, 1, 2, 3, 4, 5),
            "price": decimal.Decimal("1.10"),
            "tags": {"a", "b"},
            "pair": (1, 2),
            "big": 2**70,
            "raw": b"xyz",
            (1, "key"): None,
        }

    return checked(seen(place, RICH, additional_authorized_imports=["decimal"]), right)


@probe
def dataframe_answer(place: Place) -> str:
    code = "import pandas as pd\nfinal_answer(pd.DataFrame({'n': [1, 2]}))"
    what = seen(place, code, additional_authorized_imports=["pandas.*"])
    refused = {"Cannot safely serialize": "no: the code gets an error"}
    return checked(what, lambda answer: isinstance(answer, pd.DataFrame) and list(answer["n"]) == [1, 2], refused)


@probe
def array_answer(place: Place) -> str:
    code = "import numpy as np\nfinal_answer(np.arange(4, dtype='int16').reshape(2, 2))"
    what = seen(place, code, additional_authorized_imports=["numpy.*"])
    return checked(what, lambda it: isinstance(it, np.ndarray) and it.dtype == np.int16 and it.shape == (2, 2))


@probe
def image_answer(place: Place) -> str:
    code = "from PIL import Image\nfinal_answer(Image.new('RGB', (8, 4), (0, 9, 0)))"
    what = seen(place, code, additional_authorized_imports=["PIL.*"])
    return checked(what, lambda it: type(it).__name__ == "AgentImage" and it.to_raw().getpixel((0, 0)) == (0, 9, 0))
