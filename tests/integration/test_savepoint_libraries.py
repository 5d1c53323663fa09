"""Savepoints and branches next to the threads of native libraries: each with the package itself, where it is installed.

A package that is not in the tests' environment is not tested; docs/undo.md says which were tried.
"""

from __future__ import annotations

import importlib.util

import pytest

from executor_client import ExecutorClient, PreconditionError, Session
from tests.support.rounds import usual

ARROW = """
import pyarrow as pa, pyarrow.compute as pc, pyarrow.dataset as ds, pyarrow.parquet as pq
table = pa.table({"g": [each % 7 for each in range(200_000)], "a": list(range(200_000))})
pq.write_table(table, "table.parquet", row_group_size=10_000)
def compute():
    grouped = pq.read_table("table.parquet").group_by("g").aggregate([("a", "sum")]).sort_by("g")
    return grouped["a_sum"].to_pylist()
"""
SURVIVE: dict[str, tuple[str, str]] = {
    "pyarrow": ("pyarrow", ARROW),
    "pandas with pyarrow": (
        "pyarrow",
        """
import pandas as pd
frame = pd.DataFrame({"g": ["a", "b"] * 50_000, "a": range(100_000)})
frame["s"] = frame["g"].astype("string[pyarrow]")
def compute():
    return frame.groupby("s")["a"].sum().to_dict()
""",
    ),
    "seaborn": (
        "seaborn",
        """
import seaborn as sns, pandas as pd, matplotlib.pyplot as plt
frame = pd.DataFrame({"x": range(50), "y": range(50)})
def compute():
    axes = sns.regplot(frame, x="x", y="y", n_boot=10)
    plt.close("all")
    return len(axes.lines)
""",
    ),
    "scikit-learn": (
        "sklearn",
        """
import numpy as np
from sklearn.cluster import KMeans
from sklearn.ensemble import HistGradientBoostingClassifier
data = np.random.default_rng(1).random((5_000, 4))
def compute():
    means = KMeans(3, n_init=1, random_state=0).fit(data)
    trees = HistGradientBoostingClassifier(max_iter=3, random_state=0).fit(data, data[:, 0] > 0.5)
    return round(float(means.inertia_), 6), float(trees.score(data, data[:, 0] > 0.5))
""",
    ),
    "torch": (
        "torch",
        """
import torch
matrix = torch.arange(250_000, dtype=torch.float64).reshape(500, 500) / 1e5
def compute():
    leaf = matrix.clone().requires_grad_()
    (leaf @ leaf).sin().sum().backward()
    return round(float(leaf.grad.sum()), 6)
""",
    ),
    "numexpr": (
        "numexpr",
        """
import numexpr, numpy as np
numbers = np.arange(1_000_000.0)
def compute():
    return float(numexpr.evaluate("numbers * 2 + 1").sum())
""",
    ),
    "xgboost": (
        "xgboost",
        """
import numpy as np, xgboost
data = np.random.default_rng(1).random((2_000, 4))
def compute():
    model = xgboost.XGBClassifier(n_estimators=3, n_jobs=2).fit(data, data[:, 0] > 0.5)
    return model.predict(data).tolist()
""",
    ),
    "polars before its first query": (
        "polars",
        """
import polars as pl
frame = pl.DataFrame({"g": [1, 2, 1], "a": [1, 2, 3]})
def compute():
    return frame["a"].to_list()
""",
    ),
}
PERISH: dict[str, tuple[str, str, str]] = {
    "polars": ("polars", SURVIVE["polars before its first query"][1], "frame.lazy().group_by('g').len().collect()"),
    "duckdb": ("duckdb", "import duckdb", "duckdb.sql('select 1').fetchall()"),
}


def session_with(client: ExecutorClient, module: str, code: str) -> Session:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not in the tests' environment")
    session = client.create_session(authorized_imports=["*"], limits={"wall_time_s": 60, "memory_bytes": 2 * 2**30})
    session.execute(code).raise_for_outcome()
    return session


@pytest.mark.parametrize("what", usual(SURVIVE, but=("pyarrow", "seaborn")))
def test_a_copy_computes_with_a_library_whose_threads_it_does_not_have(client: ExecutorClient, what: str) -> None:
    with session_with(client, *SURVIVE[what]) as session:
        expected = session.execute("compute()").raise_for_outcome().output
        session.savepoint()
        session.execute("lost = 1")
        for _ in range(2):  # the copy that was there, and one that it has made
            session.rollback()
            assert session.execute("compute(), 'lost' in globals()").raise_for_outcome().output == (expected, False)
        session.savepoint()
        tried = session.try_(["compute()", "compute()"])
        assert [each.output for each in tried] == [expected] * 2
        session.keep(tried[0])
        assert session.execute("compute()").raise_for_outcome().output == expected


@pytest.mark.parametrize("what", PERISH)
def test_a_library_that_needs_its_threads_is_named_once(client: ExecutorClient, what: str) -> None:
    module, code, query = PERISH[what]
    with session_with(client, module, code) as session:
        assert session.execute("x = 1", savepoint=True).savepoint == 1, "it has no threads yet that it needs"
        session.execute(query).raise_for_outcome()
        for refused in (session.savepoint, lambda: session.try_("x")):
            with pytest.raises(PreconditionError, match=rf"threads of native libraries run.*{module}\w* \(") as error:
                refused()
            assert error.value.reason == "SAVEPOINT_REFUSED"
        first, second = (session.execute("x", savepoint=True) for _ in range(2))
        assert first.stderr == f"no savepoint before this step: {first.savepoint_refused}; steps can't be undone now\n"
        assert (second.stderr, second.savepoint_refused) == ("", first.savepoint_refused)
        session.rollback(1)
        assert session.execute(query).succeeded, "in a copy of before, it starts its threads"


def test_a_thread_that_python_does_not_list_is_named_with_its_library(client: ExecutorClient) -> None:
    with client.create_session(authorized_imports=["_thread", "time"]) as session:
        session.execute("import _thread, time; _thread.start_new_thread(time.sleep, (60,))")
        with pytest.raises(PreconditionError, match=r"threads of native libraries run.*python3?[.\w]* \("):
            session.savepoint()


def test_arrow_at_work_in_the_background_is_waited_for(client: ExecutorClient) -> None:
    """A copy would wait for ever for what the other process computes."""
    with session_with(client, "pyarrow", ARROW) as session:
        session.execute("batches = ds.dataset('table.parquet').to_batches(); total = next(batches).num_rows")
        session.execute("import time; time.sleep(0.5)")
        session.savepoint()
        session.rollback()
        assert session.execute("total + sum(batch.num_rows for batch in batches)").output == 200_000
