# Run by `executor-server images build` and the tests in a sandbox of the image: what it promises, it must do there.
import io
import sys
from pathlib import Path

import cloudpickle
import numpy
import PIL.Image
import PIL.ImageDraw

assert numpy.linalg.solve([[2.0, 0.0], [0.0, 4.0]], [2.0, 8.0]).tolist() == [1.0, 2.0]

# Functions, and objects of their own classes, which clients send by cloudpickle because they have no other form.
assert cloudpickle.loads(cloudpickle.dumps(lambda number: number + 1))(1) == 2

image = PIL.Image.new("RGB", (32, 32), "white")
PIL.ImageDraw.Draw(image).text((4, 4), "ok", fill="black")
for kind in ("PNG", "JPEG", "WEBP"):
    image.save(file := io.BytesIO(), kind)
    assert PIL.Image.open(file).size == (32, 32)

# Here nothing could be compiled once and for all any more.
loaded = [module.__spec__ for module in list(sys.modules.values()) if getattr(module, "__spec__", None)]
sources = [spec for spec in loaded if (spec.origin or "").startswith("/usr/") and spec.cached]
assert len(sources) > 100
assert [spec.name for spec in sources if not Path(spec.cached).exists()] == []

f"Python {sys.version.split()[0]}, numpy {numpy.__version__}, Pillow {PIL.__version__}"
