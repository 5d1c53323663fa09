"""Tests that only `make test-all` runs: the long ones whose claim a cheaper test of `make test` makes, too.

Each entry names a test and the parameters that are left to `make test-all`, and says what `make test` still runs of the
same claim.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Long:
    """A test of a file; `test` is the beginning of its name. Empty `parameters`: all of them."""

    file: str
    test: str
    kept: str  # the test of the same claim that `make test` runs
    parameters: tuple[str, ...] = ()  # parts of the id in brackets
    but: tuple[str, ...] = ()  # parts of it with which `make test` runs the case all the same

    def names(self, file: str, test: str) -> bool:
        """True for this test of this file; `test` is its name with the parameters."""
        name, _, bracketed = test.partition("[")
        if file != self.file or not name.startswith(self.test):
            return False
        parts = bracketed.rstrip("]").split("-")
        if any(each in parts for each in self.but):
            return False
        return not self.parameters or any(each in parts for each in self.parameters)


_DOCKER, _E2B = ("docker",), ("e2b",)
_OTHERS = ("docker", "e2b")
_LOCAL_TOO = "the same test on the local backend"
_LOCAL_AND_SOME = "all cases on the local backend, and those on the others that meet what is theirs"
_RESTARTS = "tests/chaos/test_daemon_restarts.py"
_ENGINE = "tests/chaos/test_docker_engine.py"
_KILLS = "tests/chaos/test_network_kills.py"
_CPU = "tests/contract/test_cpu_accounting.py"
_SECRETS = "tests/integration/test_network_secrets.py"
_OUTCOMES = "tests/contract/test_outcomes.py"
_STATE = "tests/contract/test_state.py"
_FITNESS = "tests/contract/test_fitness.py"
_WHEELS = "tests/security/test_hostile_wheels.py"
_BUILDER = "tests/integration/test_environment_builder.py"


LONG = (
    Long(
        "tests/integration/test_fail_over.py",
        "test_sessions_of_a_backend_that_does_not_come_back",
        "test_sessions_on_both_outlive",
    ),
    Long(
        "tests/features/test_features.py",
        "test_the_feature",
        "the table against our own executors and smolagents' local one",
        _DOCKER,
    ),
    # All three of ours have the same column, and the contract is tested on each.
    Long(
        "tests/features/test_features.py",
        "test_the_feature",
        _LOCAL_AND_SOME,
        ("ours_docker", "ours_e2b"),
        but=(
            "tool_by_decorator",
            "isolated",
            "file_given",
            "memory_limit",
            "crash",
            "interruption",
        ),
    ),
    # The guest decides these; what the backend does to them (memory, processors, pipes, a killed process) is run on all.
    Long(
        _OUTCOMES,
        "test_an_end_has_its_own_outcome",
        _LOCAL_AND_SOME,
        _OTHERS,
        but=(
            "busy loop",
            "loop in C",
            "cpu",
            "cpu of one",
            "operations",
            "flood",
            "memory",
            "shared memory",
            "hard exit",
            "killed itself",
            "syntax",
            "import",
        ),
    ),
    Long(
        _OUTCOMES,
        "test_a_hostile_source",
        _LOCAL_AND_SOME,
        _OTHERS,
        but=("deep parentheses", "many statements"),
    ),
    # What is left of a program that was stopped is the guest's to end.
    Long(_OUTCOMES, "test_a_program_that_waits_again", _LOCAL_TOO, _OTHERS),
    Long(_OUTCOMES, "test_threads_of_a_stopped", _LOCAL_TOO, _OTHERS),
    Long(_OUTCOMES, "test_a_time_limit_during_the_import", _LOCAL_TOO, _OTHERS),
    Long(_OUTCOMES, "test_a_handler_of_signals", _LOCAL_TOO, _OTHERS),
    Long(_OUTCOMES, "test_a_timer_that", _LOCAL_TOO, _OTHERS),
    # What a program says to its supervisor, the supervisor finds the same on each backend.
    *(
        Long("tests/security/test_interpreter_link.py", test, _LOCAL_TOO, _DOCKER)
        for test in (
            "test_a_lie",
            "test_a_program",
            "test_a_forged",
            "test_forged",
            "test_a_tool",
            "test_the_id",
            "test_lies",
        )
    ),
    *(
        Long("tests/security/test_hostile_descriptors.py", test, _LOCAL_TOO, _DOCKER)
        for test in ("test_a_large_message", "test_refused_messages")
    ),
    *(
        Long("tests/security/test_supervisor.py", test, _LOCAL_TOO, _DOCKER)
        for test in ("test_attacks_on", "test_what_a_program", "test_a_prelude", "test_odd_files", "test_a_directory")
    ),
    Long(_FITNESS, "test_an_interpreter_that_is_left", _LOCAL_AND_SOME, _OTHERS, but=("no descriptors",)),
    Long(_FITNESS, "test_a_program_may_close", _LOCAL_AND_SOME, _OTHERS, but=("descriptors",)),
    Long(_STATE, "test_a_hostile_reduce", _LOCAL_AND_SOME, _OTHERS, but=("import os; os._exit(1)",)),
    Long(_WHEELS, "test_an_archive_that_leads", _LOCAL_AND_SOME, _DOCKER, but=("climbing", "linking")),
    Long(
        _WHEELS,
        "test_an_archive_that_leads",
        "climbing, absolute, linking, climbing_record, deep, setuid",
        ("backslashes", "climbing_data", "lying_archive", "odd_names"),
    ),
    Long(_WHEELS, "test_a_bomb_ends", _LOCAL_TOO, _DOCKER),
    Long(_WHEELS, "test_a_bomb_ends", "the same bomb in 24 files", ("1",)),
    Long(
        _WHEELS,
        "test_a_first_import",
        "import_fills_disk and import_forks: limits of a sandbox, too",
        ("import_takes_memory",),
    ),
    Long(_WHEELS, "test_a_first_import", _LOCAL_AND_SOME, _DOCKER, but=("import_writes",)),
    Long(_WHEELS, "test_a_first_import", "import_forks, which hangs in its children too", ("import_hangs",)),
    Long(_WHEELS, "test_a_first_import", "import_fills_disk: it writes more than it may, too", ("import_prints",)),
    Long(_WHEELS, "test_a_crowd_of_files", _LOCAL_TOO, _DOCKER),
    Long(_WHEELS, "test_code_of_a_pth_file", _LOCAL_TOO, _DOCKER),
    Long(_WHEELS, "test_a_script_named", _LOCAL_TOO, _DOCKER),
    Long(_WHEELS, "test_a_package_with_anothers", _LOCAL_TOO, _DOCKER),
    Long(
        _BUILDER, "test_a_file_that_does_not_come_whole", "the other ways of it, which end without retries", ("short",)
    ),
    Long(_BUILDER, "test_an_index_out_of_order", "the other answers of such an index", ("fails",)),
    Long(_RESTARTS, "test_", _LOCAL_TOO, _DOCKER),
    Long(
        "tests/integration/test_egress_fairness.py",
        "test_a_flood",
        "the floods in the other direction, and of trailers",
        (
            "downloads in chunks of one byte",
            "terminated uploads in chunks of one byte",
            "connections with many headers",
        ),
    ),
    Long("tests/chaos/test_process_kills.py", "test_", "tests/chaos/test_process_restarts.py, on both", _OTHERS),
    Long(
        "tests/integration/fleet_ray/test_local_cluster.py",
        "test_a_node_that_fails",
        "the same test, with what is raised at once",
        ("later",),
    ),
    Long(_ENGINE, "test_a_daemon_that_is_told_to_stop_without_its_engine", "the other signal", ("19",)),
    Long(_KILLS, "test_", _LOCAL_TOO, _DOCKER),
    Long(
        "tests/integration/test_examples.py",
        "test_example_runs_as_a_script",
        "the other examples, and the page of examples/gradio_chat.py in tests/features",
        ("gradio_chat", "demo"),
    ),
    Long(
        "tests/integration/test_examples.py",
        "test_the_example_with_a_browser",
        "the other examples, and tests/integration/test_vision_browser.py",
    ),
    Long(
        "tests/integration/test_e2b_backend.py",
        "test_a_creation_survives",
        "the faults cut_before and garbage",
        ("status", "status_after", "delay", "cut_after", "truncated"),
    ),
    Long(
        "tests/integration/test_e2b_backend.py",
        "test_a_creation_that_never_succeeds",
        "the other faults",
        ("delay", "garbage", "truncated", "cut_before"),
    ),
    Long(
        "tests/integration/test_images.py",
        "test_an_image_shows_nothing",
        "the same test for the image data",
        ("base", "browser"),
    ),
    Long(
        "tests/integration/test_mcp_life.py",
        "test_the_end_of_the_connection",
        "the end of the server's input",
        ("close_both", "terminate", "close_stdout"),
    ),
    Long(_SECRETS, "test_the_token_is_set_for", _LOCAL_TOO, _DOCKER),
    Long(
        "tests/integration/test_round_trips.py",
        "test_a_hundred_megabytes",
        "the same test with an array",
        ("image", "table"),
    ),
    Long(
        "tests/chaos/test_e2b_faults.py",
        "test_no_fault_is_hidden",
        "faults at stdin and end; those of creations and connections in tests/integration/test_e2b_backend.py",
        (
            "create",
            "connect",
            "relay",
            "namespaces",
            "relay again",
            "stdin later",
            "probe",
            "lifetime",
            "pause",
            "start",
            "upload",
        ),
    ),
    Long(_ENGINE, "test_a_container_that_is_hurt", "a kill and a pause", ("remove",)),
    Long(_ENGINE, "test_a_crowd_of_creations", "the other time", ("60.0",)),
    Long(
        "tests/chaos/test_connections.py",
        "test_session_of_a_killed_client",
        "a client that is killed in an execution, and in an upload",
        (
            "between two calls",
            "in a tool call",
            "in a download larger than the journal",
        ),
    ),
    Long("tests/chaos/test_session_owners.py", "test_runs_without_with", "runs that all exit", ("some are killed",)),
    Long(
        "tests/chaos/test_fleet_deaths.py", "test_sessions_of_a_node", "a cut cable: test_fleet_networks", ("cut off",)
    ),
    Long("tests/chaos/test_leaks.py", "test_", "the same tests with a fork server", ("off",)),
    Long(
        "tests/integration/test_savepoint_libraries.py",
        "test_a_copy_computes",
        "pandas with pyarrow, scikit-learn, polars",
        ("pyarrow", "seaborn"),
    ),
    Long(_CPU, "test_children", _LOCAL_TOO, ("docker", "e2b")),
    Long(_CPU, "test_a_child_that_ended", "both on the local backend, one on the others", ("SIG_IGN",), but=("local",)),
    Long(
        "tests/integration/test_scripts.py",
        "test_a_script_does",
        "scripts with arguments, files, standard input, siblings, processes, threads and exits",
        (
            "argparse, a mistake",
            "a file in an option",
            "csv, json, pathlib",
            "dataclasses",
            "logging",
            "asyncio",
            "unittest",
            "sqlite",
            "multiprocessing",
            "tempfile and a seed",
            "many operations",
        ),
    ),
    Long("tests/integration/test_state_export.py", "test_a_state_of_docker", "from Docker to local", _E2B),
    Long(
        "tests/contract/test_foreign_modules.py",
        "test_",
        "CPython 3.9 and the daemon's own with libraries; 3.13 in test_import_corpus.py",
        ("3.10", "3.11", "3.12", "3.13"),
    ),
    Long(
        "tests/contract/test_import_corpus.py",
        "test_",
        "CPython 3.9, 3.13 and the daemon's own",
        ("3.10", "3.11", "3.12"),
    ),
    Long(
        "tests/integration/test_cloud_namespaces.py",
        "test_a_session_lives",
        "CPython 3.9 and 3.13",
        ("3.10", "3.11", "3.12"),
    ),
    Long("tests/contract/test_pythons.py", "test_", "CPython 3.9 and 3.13", ("3.10", "3.11", "3.12")),
    Long("tests/unit/guest/checks/test_instrumentation.py", "test_", "CPython 3.9 and 3.13", ("3.10", "3.11", "3.12")),
    Long("tests/unit/guest/cloud/test_relay.py", "test_both", "CPython 3.9 and 3.13", ("3.10", "3.11", "3.12")),
    Long(
        "tests/integration/test_state_pythons.py",
        "test_a_state_goes",
        "to CPython 3.9",
        ("3.10", "3.12", "3.13"),
    ),
)


_BY_FILE = {each.file: [other for other in LONG if other.file == each.file] for each in LONG}


def is_long(file: str, test: str) -> bool:
    """True for a test that `make test` leaves to `make test-all`."""
    return any(each.names(file, test) for each in _BY_FILE.get(file, ()))


def leave_out_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects them, unless one was asked for by its whole id."""
    asked = set(config.args)
    long = [
        item
        for item in items
        if item.nodeid not in asked and is_long(item.nodeid.partition("::")[0], item.nodeid.rpartition("::")[2])
    ]
    if long:
        config.hook.pytest_deselected(items=long)
        gone = set(long)
        items[:] = [item for item in items if item not in gone]
