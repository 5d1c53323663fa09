"""Google ADK's E2B environment: an agent with a scripted model works in it with ADK's own tools for environments."""

from __future__ import annotations

import asyncio

from google.adk.integrations.e2b import E2BEnvironment


async def main() -> None:
    environment = E2BEnvironment(timeout=120, env_vars={"COLOUR": "teal"})
    await environment.initialize()
    try:
        await environment.write_file("work/a.txt", "three\nlines\nhere\n")
        counted = await environment.execute("wc -l < work/a.txt; echo $COLOUR")
        assert (counted.exit_code, counted.stdout.split()) == (0, ["3", "teal"]), counted
        assert await environment.read_file("work/a.txt") == b"three\nlines\nhere\n"
        failed = await environment.execute("echo gone >&2; exit 3")
        assert (failed.exit_code, failed.stderr) == (3, "gone\n"), failed
        assert (await environment.execute("sleep 30", timeout=1)).timed_out
        try:
            await environment.read_file("work/missing")
        except FileNotFoundError:
            pass
        else:
            raise AssertionError("a missing file must be reported")
    finally:
        await environment.close()


if __name__ == "__main__":
    asyncio.run(main())
