"""Guests are asked once what an image lacks, and only about what could be missing."""

from __future__ import annotations

from collections.abc import Sequence

from executor_server.sessions.needed_packages import ASKED_MAX, ImageModules, top_modules


class Guest:
    """Answers for an image that has numpy only."""

    def __init__(self, *there: str) -> None:
        self.there = set(there)
        self.asked: list[list[str]] = []

    async def find(self, modules: Sequence[str]) -> Sequence[str]:
        self.asked.append(list(modules))
        return [name for name in modules if name not in self.there]


def test_patterns_are_about_their_top_modules_and_the_standard_library_counts_as_there() -> None:
    assert top_modules(["numpy.*", "numpy.linalg", "*", "os.path", "math", "winreg", "bs4"]) == ["numpy", "bs4"]
    assert len(top_modules(f"module{number}" for number in range(10_000))) == ASKED_MAX


async def test_a_guest_is_asked_once_for_each_module_of_an_image() -> None:
    modules, guest = ImageModules(), Guest("numpy")
    assert await modules.missing("one", ["numpy.*", "pandas", "math"], guest.find) == ("pandas",)
    assert await modules.missing("one", ["pandas.*", "numpy"], guest.find) == ("pandas",)
    assert await modules.missing("one", ["scipy", "pandas", "numpy"], guest.find) == ("scipy", "pandas")
    assert guest.asked == [["numpy", "pandas"], ["scipy"]]


async def test_another_image_is_asked_anew() -> None:
    modules = ImageModules()
    assert await modules.missing("old", ["pandas"], Guest().find) == ("pandas",)
    assert await modules.missing("rebuilt", ["pandas"], Guest("pandas").find) == ()


async def test_nobody_is_asked_about_nothing() -> None:
    guest = Guest()
    assert await ImageModules().missing("one", ["*", "math", "json.decoder"], guest.find) == ()
    assert not guest.asked


async def test_what_is_remembered_is_bounded() -> None:
    modules, guest = ImageModules(), Guest()
    for number in range(500):
        names = [f"m{number}_{each}" for each in range(ASKED_MAX)]
        assert len(await modules.missing("one", names, guest.find)) == ASKED_MAX
        await modules.missing(f"image{number}", ["a"], guest.find)
    guest.asked.clear()
    await modules.missing("image0", ["a"], guest.find)
    await modules.missing("one", ["m0_0"], guest.find)
    assert guest.asked == [["a"], ["m0_0"]], "the oldest are forgotten"
