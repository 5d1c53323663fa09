"""The pages of a library's code that a certificate needs are given back, and none that the loader has changed."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.hazmat.bindings import _rust

from executor_server.network.proxy.authority import Authority
from executor_server.network.proxy.code_pages import CodePages

LIBRARY = str(_rust.__file__)
KIB = 1024


def resident(library: str) -> int:
    """Bytes of the library's mappings that are in this process's memory and are the file's own."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            ours = rest[-1] == library
        elif ours and name in ("Private_Clean:", "Shared_Clean:"):
            total += int(rest[0]) * KIB
    return total


def test_a_certificate_leaves_no_code_in_memory_and_the_next_one_is_as_good(tmp_path: Path) -> None:
    authority = Authority.read(tmp_path / "egress")
    authority.leaf("a.example")
    needed = resident(LIBRARY)
    authority.context_for("b.example")
    assert needed > 2**21, "without this test being about megabytes, there is nothing to give back"
    assert resident(LIBRARY) < needed // 4
    leaf = x509.load_pem_x509_certificate(authority.leaf("c.example"))
    assert leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
        x509.DNSName
    ) == ["c.example"]


def test_a_library_that_is_not_loaded_has_nothing_to_give_back() -> None:
    before = resident(LIBRARY)
    CodePages("/nowhere/_rust.abi3.so").release()
    CodePages("").release()
    assert resident(LIBRARY) == before
