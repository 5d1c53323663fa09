"""Finds the packages that a module may come from, if their names differ: the package called "bs4" is a stranger's.

Source of the table: the projects' own instructions to install and to import them, as of November 2026. It has the
packages that agents ask for most, except modules whose only package has the module's own name. If several packages have
the module, the first one is the best for a sandbox without a display and a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "Bio": ("biopython",),
    "Crypto": ("pycryptodome",),
    "Cryptodome": ("pycryptodomex",),
    "Levenshtein": ("levenshtein", "python-levenshtein"),
    "MySQLdb": ("mysqlclient",),
    "OpenGL": ("pyopengl",),
    "OpenSSL": ("pyopenssl",),
    "PIL": ("pillow",),
    "Xlib": ("python-xlib",),
    "absl": ("absl-py",),
    "agents": ("openai-agents",),
    "apiclient": ("google-api-python-client",),
    "attr": ("attrs",),
    "azure.core": ("azure-core",),
    "azure.identity": ("azure-identity",),
    "azure.storage.blob": ("azure-storage-blob",),
    "bidi": ("python-bidi",),
    "bs4": ("beautifulsoup4",),
    "cairo": ("pycairo",),
    "chess": ("chess", "python-chess"),
    "community": ("python-louvain",),
    "cv2": ("opencv-python-headless", "opencv-python", "opencv-contrib-python-headless", "opencv-contrib-python"),
    "dateutil": ("python-dateutil",),
    "discord": ("discord-py",),
    "dns": ("dnspython",),
    "docx": ("python-docx",),
    "dotenv": ("python-dotenv",),
    "enchant": ("pyenchant",),
    "engineio": ("python-engineio",),
    "faiss": ("faiss-cpu",),
    "fitz": ("pymupdf",),
    "frontmatter": ("python-frontmatter",),
    "gi": ("pygobject",),
    "git": ("gitpython",),
    "github": ("pygithub",),
    "gitlab": ("python-gitlab",),
    "google.api_core": ("google-api-core",),
    "google.auth": ("google-auth",),
    "google.cloud.aiplatform": ("google-cloud-aiplatform",),
    "google.cloud.bigquery": ("google-cloud-bigquery",),
    "google.cloud.storage": ("google-cloud-storage",),
    "google.genai": ("google-genai",),
    "google.generativeai": ("google-generativeai",),
    "google.protobuf": ("protobuf",),
    "googleapiclient": ("google-api-python-client",),
    "grpc": ("grpcio",),
    "grpc_health": ("grpcio-health-checking",),
    "grpc_status": ("grpcio-status",),
    "grpc_tools": ("grpcio-tools",),
    "igraph": ("igraph", "python-igraph"),
    "imblearn": ("imbalanced-learn",),
    "jose": ("python-jose",),
    "jwt": ("pyjwt",),
    "kafka": ("kafka-python",),
    "ldap": ("python-ldap",),
    "llama_cpp": ("llama-cpp-python",),
    "magic": ("python-magic",),
    "markdown_it": ("markdown-it-py",),
    "memcache": ("python-memcached",),
    "mpl_toolkits": ("matplotlib",),
    "mpl_toolkits.basemap": ("basemap",),
    "multipart": ("python-multipart",),
    "mysql.connector": ("mysql-connector-python",),
    "nacl": ("pynacl",),
    "odf": ("odfpy",),
    "opentelemetry.sdk": ("opentelemetry-sdk",),
    "osgeo": ("gdal",),
    "paho": ("paho-mqtt",),
    "pdfminer": ("pdfminer-six",),
    "pkg_resources": ("setuptools",),
    "pptx": ("python-pptx",),
    "psycopg2": ("psycopg2-binary", "psycopg2"),
    "pylab": ("matplotlib",),
    "pynvml": ("nvidia-ml-py",),
    "pythonjsonlogger": ("python-json-logger",),
    "pywt": ("pywavelets",),
    "rest_framework": ("djangorestframework",),
    "ruamel": ("ruamel-yaml",),
    "ruamel.yaml": ("ruamel-yaml",),
    "serial": ("pyserial",),
    "shapefile": ("pyshp",),
    "skimage": ("scikit-image",),
    "sklearn": ("scikit-learn",),
    "skopt": ("scikit-optimize",),
    "slugify": ("python-slugify",),
    "snappy": ("python-snappy",),
    "socketio": ("python-socketio",),
    "socks": ("pysocks",),
    "speech_recognition": ("speechrecognition",),
    "talib": ("ta-lib",),
    "telegram": ("python-telegram-bot",),
    "tensorflow": ("tensorflow-cpu", "tensorflow"),
    "tlz": ("toolz",),
    "umap": ("umap-learn",),
    "usb": ("pyusb",),
    "vlc": ("python-vlc",),
    "websocket": ("websocket-client",),
    "whisper": ("openai-whisper",),
    "wikipediaapi": ("wikipedia-api",),
    "wx": ("wxpython",),
    "xdist": ("pytest-xdist",),
    "yaml": ("pyyaml",),
    "zmq": ("pyzmq",),
}

# Modules that Python 3.12 or 3.13 removed: images with a newer Python lack them, and PyPI has strangers of these names.
_ONCE_IN_PYTHON = frozenset(
    {
        "aifc",
        "asynchat",
        "asyncore",
        "audioop",
        "cgi",
        "cgitb",
        "chunk",
        "crypt",
        "distutils",
        "imghdr",
        "imp",
        "lib2to3",
        "mailcap",
        "msilib",
        "nis",
        "nntplib",
        "ossaudiodev",
        "pipes",
        "smtpd",
        "sndhdr",
        "spwd",
        "sunau",
        "telnetlib",
        "uu",
        "xdrlib",
    }
)


def is_pythons(module: str) -> bool:
    """True for a module of any supported Python's standard library. No package is installed for such a module."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in _ONCE_IN_PYTHON


def candidates(module: str, imports: Mapping[str, str]) -> tuple[str, ...]:
    """Returns names of packages that a module may be in, the likeliest first; `imports` takes precedence.

    A dotted module is looked up by its longest known beginning: "google.cloud.storage.blob" is found under
    "google.cloud.storage". The last candidate is the name of its top-level module itself.
    """
    beginnings = _beginnings(module)
    own = next((imports[each] for each in beginnings if each in imports), None)
    if own is not None:
        return (own,)
    known = next((DISTRIBUTIONS[each] for each in beginnings if each in DISTRIBUTIONS), ())
    return tuple(dict.fromkeys((*known, beginnings[-1])))


def likeliest(modules: Iterable[str]) -> list[str]:
    """Returns the likeliest package of each module that is not Python's own, by name and each once."""
    return sorted({candidates(module, {})[0] for module in modules if not is_pythons(module)})


def _beginnings(module: str) -> list[str]:
    """The module and those above it, the longest first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
