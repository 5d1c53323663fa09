"""Finds the distribution that provides a module, for messages that say what an image lacks.

A module and its package may have different names: `pip install bs4` may install a stranger's package.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterable

# Modules that agents' tools import, and whose distribution has another name. Of several, the one for servers.
_DISTRIBUTIONS = {
    "Bio": "biopython",
    "Crypto": "pycryptodome",
    "Cryptodome": "pycryptodomex",
    "Levenshtein": "python-Levenshtein",
    "OpenSSL": "pyOpenSSL",
    "PIL": "pillow",
    "PyPDF2": "PyPDF2",
    "Xlib": "python-xlib",
    "agents": "openai-agents",
    "apiclient": "google-api-python-client",
    "attr": "attrs",
    "attrs": "attrs",
    "bs4": "beautifulsoup4",
    "chess": "chess",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "ddgs": "ddgs",
    "discord": "discord.py",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "duckduckgo_search": "duckduckgo-search",
    "faiss": "faiss-cpu",
    "fitz": "PyMuPDF",
    "flask_cors": "Flask-Cors",
    "git": "GitPython",
    "github": "PyGithub",
    "gi": "PyGObject",
    "google.cloud.bigquery": "google-cloud-bigquery",
    "google.cloud.storage": "google-cloud-storage",
    "google.generativeai": "google-generativeai",
    "google.protobuf": "protobuf",
    "googleapiclient": "google-api-python-client",
    "grpc": "grpcio",
    "huggingface_hub": "huggingface-hub",
    "jose": "python-jose",
    "jwt": "PyJWT",
    "kafka": "kafka-python",
    "ldap": "python-ldap",
    "llama_index": "llama-index",
    "magic": "python-magic",
    "markdown": "Markdown",
    "mpl_toolkits": "matplotlib",
    "mysql": "mysql-connector-python",
    "MySQLdb": "mysqlclient",
    "nacl": "PyNaCl",
    "odf": "odfpy",
    "pkg_resources": "setuptools",
    "playwright": "playwright",
    "pptx": "python-pptx",
    "psycopg2": "psycopg2-binary",
    "pydantic_settings": "pydantic-settings",
    "pylab": "matplotlib",
    "pymongo": "pymongo",
    "pysubs2": "pysubs2",
    "pythoncom": "pywin32",
    "pywt": "PyWavelets",
    "rdkit": "rdkit",
    "ruamel": "ruamel.yaml",
    "sentence_transformers": "sentence-transformers",
    "serial": "pyserial",
    "six.moves": "six",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "slack_sdk": "slack-sdk",
    "slugify": "python-slugify",
    "snappy": "python-snappy",
    "socks": "PySocks",
    "speech_recognition": "SpeechRecognition",
    "telegram": "python-telegram-bot",
    "umap": "umap-learn",
    "usb": "pyusb",
    "websocket": "websocket-client",
    "wikipediaapi": "Wikipedia-API",
    "win32api": "pywin32",
    "wx": "wxPython",
    "yaml": "PyYAML",
    "youtube_transcript_api": "youtube-transcript-api",
    "yt_dlp": "yt-dlp",
    "zmq": "pyzmq",
}


def distribution_of(module: str) -> str | None:
    """Returns the distribution to install for a module of this dotted name; None for a module of Python's own.

    Looks in the table, then among the installed distributions; otherwise returns the module's first name, which is
    usually right.
    """
    parts = module.split(".")
    if parts[0] in sys.stdlib_module_names:
        return None
    for length in range(len(parts), 0, -1):
        known = _DISTRIBUTIONS.get(".".join(parts[:length]))
        if known is not None:
            return known
    installed = _installed_for(parts[0])
    return installed[0] if len(installed) == 1 else parts[0].replace("_", "-")


def distributions_of(modules: Iterable[str]) -> list[str]:
    """Returns the distributions for these modules, each once, by name."""
    return sorted({name for name in map(distribution_of, modules) if name is not None}, key=str.lower)


def _installed_for(top: str) -> list[str]:
    found = importlib.metadata.packages_distributions().get(top, ())
    return sorted({re.sub(r"[-_.]+", "-", name) for name in found})
