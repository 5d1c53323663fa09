"""CrewAI's three tools for E2B: Python, commands, and files of one sandbox."""

from __future__ import annotations

from crewai_tools import E2BExecTool, E2BFileTool, E2BPythonTool


def main() -> None:
    python = E2BPythonTool(persistent=True)
    assert python.run(code="x = 6")["error"] is None
    answer = python.run(code="print('out'); x * 7")
    assert (answer["text"], answer["stdout"]) == ("42", ["out\n"]), answer
    failed = python.run(code="import nothing_of_this_name")
    assert failed["error"]["name"] == "ModuleNotFoundError", failed
    sandbox_id = python._persistent_sandbox.sandbox_id
    files = E2BFileTool(sandbox_id=sandbox_id)
    assert files.run(action="write", path="/home/user/notes/a.txt", content="one\ntwo\n")["status"] == "written"
    assert files.run(action="read", path="/home/user/notes/a.txt")["content"] == "one\ntwo\n"
    assert [each["name"] for each in files.run(action="list", path="/home/user/notes")["entries"]] == ["a.txt"]
    shell = E2BExecTool(sandbox_id=sandbox_id)
    counted = shell.run(command="wc -l < notes/a.txt", cwd="/home/user")
    assert (counted["exit_code"], counted["stdout"].strip()) == (0, "2"), counted
    python.close()
    assert E2BPythonTool().run(code="1 + 1")["text"] == "2"


if __name__ == "__main__":
    main()
