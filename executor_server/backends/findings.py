"""The findings of `check-host`: each backend's examination of a host adds to them, and `start` decides by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from executor_server.backends.base import HostFinding
from executor_server.core import SandboxFailure

Confinement = tuple[str, bool, str]
"""Subject, True when it is as it must be, a sentence."""


@dataclass
class Findings:
    """Findings in the order in which they were made."""

    findings: list[HostFinding] = field(default_factory=list)

    def add(self, subject: str, ok: bool, detail: str, remedy: str = "", *, required: bool = True) -> None:
        self.findings.append(HostFinding(subject, ok, detail, "" if ok else remedy, required))

    def add_confinement(self, found: Iterable[Confinement], remedy: str) -> None:
        """Adds a sandbox's findings about itself, without subjects that an earlier image's sandbox has covered."""
        for subject, ok, detail in found:
            if not self.has(subject):
                self.add(subject, ok, detail, remedy)

    def has(self, subject: str) -> bool:
        return any(finding.subject == subject for finding in self.findings)

    @property
    def suffices(self) -> bool:
        return all(finding.ok for finding in self.findings if finding.required)

    def refusal(self, backend: str) -> SandboxFailure:
        """The reason why a backend does not start, with what is missing and the remedies."""
        missing = [finding for finding in self.findings if finding.required and not finding.ok]
        sentences = " ".join(f"{finding.subject}: {finding.detail} {finding.remedy}" for finding in missing)
        return SandboxFailure(f"this host cannot run {backend} sandboxes. {sentences}")


def confinement_findings(
    *, is_alone: bool, interfaces: Sequence[str], is_bare: bool, is_filtered: bool, own_kernel: str = ""
) -> Iterator[Confinement]:
    """Sentences about the walls that look the same from inside every sandbox on a Linux host.

    `own_kernel` is the release of a kernel that is not the host's (gVisor, a virtual machine). It loads no filter, and
    the kernel that a filter would protect is not there.
    """
    yield "process namespace", is_alone, "It sees its own processes only." if is_alone else "It sees other processes."
    cut_off = set(interfaces) <= {"lo"}
    yield "network namespace", cut_off, "It has no network." if cut_off else f"It sees {', '.join(interfaces)}."
    yield "privileges", is_bare, "It has no capabilities and can gain none." if is_bare else "It keeps capabilities."
    if own_kernel:
        yield "system call filter", True, f"It has a kernel of its own ({own_kernel}), not the host's."
    else:
        yield (
            "system call filter",
            is_filtered,
            "A seccomp filter is on." if is_filtered else "No seccomp filter is on.",
        )
