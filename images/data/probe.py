# Run by `executor-server images build` and the tests in a sandbox of the image: what it promises, it must do there.
import io
import sys
import warnings
from pathlib import Path

import bs4
import docx
import lxml.etree
import matplotlib.font_manager
import matplotlib.pyplot as plt
import networkx
import openpyxl
import pandas as pd
import plotly.express
import polars
import pyarrow.parquet
import pypdf
import requests
import scipy.optimize
import scipy.stats
import seaborn
import sklearn.linear_model
import sympy
import tabulate
import tqdm
import xlrd
import yaml

warnings.simplefilter("error")

table = pd.DataFrame({"region": ["north", "south"] * 3, "units": [1.5, 2.5, 3.5, 4.5, 5.5, 6.5]})
assert table.groupby("region")["units"].sum().to_dict() == {"north": 10.5, "south": 13.5}
for write, read in ((table.to_parquet, pd.read_parquet), (table.to_excel, pd.read_excel)):
    write(file := io.BytesIO(), index=False)
    assert read(file).equals(table)
assert table.to_markdown(index=False).startswith("| region")
assert pd.read_html(io.StringIO(table.to_html(index=False)))[0].equals(table)
sums = polars.from_pandas(table).group_by("region").agg(polars.col("units").sum()).sort("region")
assert sums.to_pandas()["units"].to_list() == [10.5, 13.5]
assert "Plotly" in plotly.express.bar(sums, x="region", y="units").to_html()
assert pd.Timestamp("2025-07-01", tz="Europe/Zurich").utcoffset().total_seconds() == 7200

model = sklearn.linear_model.LinearRegression().fit([[1.0], [2.0]], [2.0, 4.0])
assert round(float(model.predict([[3.0]])[0])) == 6
assert abs(scipy.optimize.brentq(lambda x: x * x - 2, 0, 2) - 2**0.5) < 1e-9
assert sympy.integrate("2*x") == sympy.Symbol("x") ** 2
assert networkx.shortest_path_length(networkx.path_graph(4), 0, 3) == 3
assert bs4.BeautifulSoup("<p>Hi</p>", "lxml").p.text == "Hi"
assert yaml.safe_load("[1, 2]") == [1, 2]

families = {font.name for font in matplotlib.font_manager.fontManager.ttflist}
assert {"DejaVu Sans", "Liberation Sans", "Droid Sans Fallback"} <= families
seaborn.barplot(table, x="region", y="units", errorbar=None)
plt.title("Grüezi, 你好, こんにちは")  # a character that no font has would be a warning
plt.show()

loaded = [module.__spec__ for module in list(sys.modules.values()) if getattr(module, "__spec__", None)]
sources = [spec for spec in loaded if (spec.origin or "").startswith("/usr/") and spec.cached]
assert [spec.name for spec in sources if not Path(spec.cached).exists()] == []

f"pandas {pd.__version__}, scipy {scipy.__version__}, matplotlib {matplotlib.__version__}"
