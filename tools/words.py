"""Refuses private words and circuitous openings in identifiers, docstrings, comments and the pages of docs/.

    python tools/words.py [PATH ...]

Without a path it reads what `[tool.words]` in pyproject.toml lists. It prints `file:line: "phrase" -> what to use`, and
fails when there is anything to print. It reads:

- Python: docstrings, comments, identifiers, module names, and string literals that are identifiers (keys, log events);
- .proto files, shell scripts, Makefiles, Dockerfiles, YAML and TOML: comments;
- Markdown: prose, and the identifiers between backticks. Blocks of code are skipped, and so are sections between
  `<!-- NAME: made by … -->` and `<!-- end of NAME -->`, whose words stand in the source that they are made of.

A finding that is right where it stands is silenced with its reason: `# words-ok: the Unix user`, on the line, on the
line above, or after the docstring. In Markdown it is `<!-- words-ok: … -->`. A silence without a reason, or without a
finding, is itself a finding.
"""

from __future__ import annotations

import ast
import bisect
import functools
import itertools
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# ---------------------------------------------------------------------------------------------------------------------
# The words


@dataclass(frozen=True)
class Word:
    """One refused word: where it is refused, and what to use instead."""

    instead: str
    # Parts of identifiers, in lower case: `room` hits `Room`, `_add_room`, `room_of`, and module room.py.
    parts: str = ""
    # Whole identifiers, as a regular expression.
    names: str = ""
    # Names of modules only: files, and lines that import.
    modules: str = ""
    # In prose, as a regular expression; matched in any case.
    prose: str = ""
    # True when string literals that are identifiers count, and names of test functions too. False for verbs: a test's
    # name is a claim, and claims are compared by name from one version to the next.
    strict: bool = True


WORDS = (
    Word(
        "connection (GuestConnection)",
        names=r"_?(Guest)?Ways?|Way(State|Control)|session_way|guest_way",
        modules="session_way",
    ),
    Word(
        "connection",
        prose=r"(?<!on its )(?<!on their )(?<!on the )\bways? (in)?to (the|a|an|its|this|that|each|every) "
        r"(guest|sandbox|daemon)s?\b"
        r"|\bways?( to \w+( \w+)?)?( that)?( is| was| were)? (broke|breaks?|broken|cut|silent|made again|opens?)\b"
        r"|\b(broken|silent|new|open) ways?\b|\bon every way\b|\bthe way (knows|asks|is suspected)\b",
    ),
    Word("journal", parts="ledger", prose=r"\bledgers?\b"),
    Word("segments, journal", parts="tape|tapes", prose=r"\btapes?\b"),
    Word("RecordKind", names=r"_?Marks?"),
    Word("AdmissionController; timed admission; in a test: barrier", parts="gate|gates", prose=r"\bgates?\b"),
    Word("running queue", names="_?Turns", modules="turns"),
    Word("FairSemaphore", names="[Ff]air_?[Qq]ueue", modules="fair_queue", prose=r"\bfair (queue|turn)s?\b"),
    Word(
        "creation queue", names="_?creation_turns|CreationTurns", modules="creation_turns", prose=r"\bcreation turns?\b"
    ),
    Word("child processes", parts="crew|crews", prose=r"\bcrews?\b"),
    Word(
        "WarmInterpreter, warm interpreter",
        parts="spare",
        prose=r"\b(the|a|an|its|no|each|this|one|another) spare\b(?! (part|time))"
        r"|\bspare interpreters?\b|, (and )?spare\b",
    ),
    Word("LeaseRenewer; renewer", parts="keeper|keepers", prose=r"\bkeepers?\b"),
    Word("RuleEnforcer", parts="referee|referees", prose=r"\breferees?\b"),
    Word("paths", modules="place"),
    Word("namespaces", parts="nest|nests", prose=r"\bnests?\b"),
    Word("import functions", modules="relays"),
    Word("Resources", names="_?[Mm]eans"),
    Word("HostCapabilities", parts="kit|kits", prose=r"\bkits?\b"),
    Word("SandboxFactory; factory", parts="maker|makers", prose=r"\bmakers?\b"),
    Word("Hooks", names="_?Watch"),
    Word("retry", parts="patience", prose=r"\bpatience\b"),
    Word("teardown", parts="endings", names="_?Ending", prose=r"(?<!line )\bendings\b"),
    Word("stderr file", parts="complaint|complaints", prose=r"\bcomplaints?\b"),
    Word("missing", names="_?Gone(Sandbox)?", modules="gone"),
    Word("requests (operations are what the budget counts)", modules="operations"),
    Word(
        "report, notify, say; tell apart: distinguish",
        parts="told|tell|tells|telling",
        prose=r"\b(told|tell|tells|telling)\b",
        strict=False,
    ),
    Word("check, decide", parts="judge|judges|judged|judging", prose=r"\bjudg(e|es|ed|ing|ement|ment)\b", strict=False),
    Word("release, drop", prose=r"\blet(s|ting)? (\w+ )?go\b(?! on\b)"),
    Word("again, recreated", parts="anew", prose=r"\banew\b", strict=False),
    Word("no client, no process; `is not`", parts="nobody", prose=r"(?<!user )(?<!uid )\bnobody\b(?!:)", strict=False),
    Word("a client, another process", parts="somebody", prose=r"\bsomebody\b", strict=False),
    Word("the caller", parts="whoever", prose=r"\bwhoever\b", strict=False),
    Word("carry", prose=r"\bbears?\b"),
    Word("ensure", prose=r"\b(see|sees|seen|saw) to it\b|\bto it that\b"),
    Word("plain words: subject, verb, reason", prose=r"\bwhat of it\b|\bgo(es)? down with\b"),
)

# Identifiers that a rule hits and that are right.
ALLOWED_NAMES = {
    "NOBODY": "the Unix user",
    "as_nobody": "the Unix user",
    "_as_nobody": "the Unix user",
    "_require_nobody": "the Unix user",
    "SPARE_DESCRIPTORS": "plain English: descriptors that are left over",
}

# Headless clauses: an answer without its question. All but a question may not begin with them.
_HEADLESS = re.compile(r"(what|whatever|whether|that|how|why|who|whose|whom|which)\b", re.IGNORECASE)
_OF = re.compile(r"of\b(?! course)", re.IGNORECASE)
# These begin a subordinate clause, which is right when the main clause follows after a comma.
_SUBORDINATE = re.compile(r"(Where|When|For)\b(?! example)")
_FIRST_SENTENCE = re.compile(r".*?[.?!](?=\s|$)|.*", re.DOTALL)
_BEFORE_MAIN_CLAUSE = re.compile(r"[^.;:?!]*", re.DOTALL)
SUBJECT_FIRST = "begin with a subject or a verb: Returns, Reads, The …, True when …, Seconds …"


_PROSE = tuple((word, re.compile(word.prose, re.IGNORECASE)) for word in WORDS if word.prose)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class Block:
    """Prose that belongs together: a docstring, the lines of a comment, a paragraph."""

    line: int
    text: str
    kind: str  # docstring, comment, page

    @property
    def last(self) -> int:
        return self.line + self.text.count("\n")


@dataclass(frozen=True, order=True)
class Finding:
    path: str
    line: int
    phrase: str
    instead: str

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: "{self.phrase}" -> {self.instead}'


@dataclass
class Source:
    """A file as the rules see it."""

    blocks: list[Block] = field(default_factory=list)
    # Identifier, and the lines it stands on.
    names: dict[str, list[int]] = field(default_factory=dict)
    # String literals that are identifiers.
    literals: dict[str, list[int]] = field(default_factory=dict)
    imports: list[tuple[int, str]] = field(default_factory=list)
    # Line of a silence, and whether it stands alone on its line.
    silences: dict[int, bool] = field(default_factory=dict)
    broken_silences: list[int] = field(default_factory=list)


_SILENCE = re.compile(r"words-ok\b(?P<reason>:\s*\w[^>\n]*)?.*")
# Tokens of Python as far as the rules need them. A regular expression, since `tokenize` takes ten times as long; an
# f-string counts as a string, and the code in its braces is not read.
_TOKENS = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |[A-Za-z]{0,2}(?:\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<name>[A-Za-z_]\w*)
    |\d[\w.]*""",
    re.VERBOSE | re.DOTALL,
)
_IDENTIFIER_LITERAL = re.compile(r"""[bru]?(["'])([A-Za-z_][A-Za-z_0-9-]*)\1""")


def read_python(text: str) -> Source:
    """Docstrings (also those of attributes), comments, identifiers and imports of a module."""
    source = Source()
    for statement in _statements(ast.parse(text).body):
        if isinstance(statement, ast.Expr) and isinstance(value := statement.value, ast.Constant):
            if isinstance(value.value, str):
                source.blocks.append(Block(value.lineno, value.value, "docstring"))
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            source.imports.append((statement.lineno, ast.unparse(statement)))
    comments: list[tuple[int, bool, str]] = []
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    for token in _TOKENS.finditer(text):
        at = token.start()
        line = bisect.bisect_right(starts, at)
        if name := token["name"]:
            if name != "tell" or not (
                text[at - 1] == "." and text.startswith("()", token.end())
            ):  # the method of files
                source.names.setdefault(name, []).append(line)
        elif comment := token["comment"]:
            comments.append((line, not text[starts[line - 1] : at].strip(), comment.lstrip("#")))
        elif match := _IDENTIFIER_LITERAL.fullmatch(token[0]):
            source.literals.setdefault(match[2], []).append(line)
    _add_comments(source, comments)
    return source


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, part, ()))
        for part in ("handlers", "cases"):
            for branch in getattr(statement, part, ()):
                yield from _statements(branch.body)


def _add_comments(source: Source, comments: Iterable[tuple[int, bool, str]]) -> None:
    """Joins the comments of successive lines of their own; a comment behind code is by itself."""
    lines: list[tuple[int, str]] = []

    def close() -> None:
        if lines:
            source.blocks.append(Block(lines[0][0], "\n".join(line for _, line in lines), "comment"))
            lines.clear()

    for number, alone, comment in comments:
        if match := _SILENCE.search(comment):
            if match["reason"]:
                source.silences[number] = alone
            else:
                source.broken_silences.append(number)
            comment = comment[: match.start()]
        if not alone or (lines and lines[-1][0] != number - 1):
            close()
        lines.append((number, comment.strip()))
        if not alone:
            close()
    close()


def read_comments(text: str, marker: str) -> Source:
    """Comments of a file whose comments begin with `marker`, at a line's start or after a blank."""
    source = Source()
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.search(rf"(?:^|\s){marker}+(?!!)(?=\s|$)(.*)", line)
        if match:
            found.append((number, not line[: match.start()].strip(), match[1]))
    _add_comments(source, found)
    return source


_PARAGRAPH_MARK = re.compile(r"\s*(?:[-*+]|\d+\.|>|#+)\s+|\s*\|\s*")


def read_markdown(text: str) -> Source:
    """Paragraphs, list items and table rows; what stands between backticks counts as identifiers."""
    source = Source()
    fenced, made, lines, begin = False, False, list[str](), 0

    def close() -> None:
        if lines:
            source.blocks.append(Block(begin, "\n".join(lines), "page"))
            lines.clear()

    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
            close()
            continue
        if line.startswith("<!--") and (" made by " in line or line.startswith("<!-- end of ")):
            made = " made by " in line
            close()
            continue
        if fenced or made:
            continue
        if match := _SILENCE.search(line):
            if match["reason"]:
                source.silences[number] = True
            else:
                source.broken_silences.append(number)
            line = re.sub(r"<!--.*?-->", "", line)
            if not line.strip():
                continue
        if line.startswith("    ") and not lines:  # indented code
            continue
        mark = _PARAGRAPH_MARK.match(line)
        if not line.strip() or mark:
            close()
        if line.strip():
            begin = begin if lines else number
            lines.append(line[mark.end() :] if mark and not line.lstrip().startswith("|") else line)
    close()
    for block in source.blocks:
        for span in re.finditer(r"`([^`]+)`", block.text):
            number = block.line + block.text.count("\n", 0, span.start())
            for name in re.findall(r"[A-Za-z_][A-Za-z_0-9]*", span[1]):
                source.literals.setdefault(name, []).append(number)
    return source


def read(path: Path) -> Source | None:
    """The file as the rules see it; None for a kind of file that has no rules."""
    name = path.name
    if name.endswith(".py"):
        return read_python(path.read_text())
    if name.endswith(".md"):
        return read_markdown(path.read_text())
    if name.endswith(".proto"):
        return read_comments(path.read_text(), "//")
    if name.endswith((".sh", ".yaml", ".yml", ".toml", ".cfg", ".in")) or name in ("Makefile", "Dockerfile"):
        return read_comments(path.read_text(), "#")
    if not path.suffix and path.read_bytes()[:2] == b"#!":
        return read_comments(path.read_text(), "#")
    return None


# ---------------------------------------------------------------------------------------------------------------------
# The rules


def check(path: str, source: Source) -> list[Finding]:
    """All findings of a file that are not silenced, and the silences that are wrong."""
    used: set[int] = set()
    findings = []
    for found, first, last in _all(path, source):
        silence = _silence(source.silences, first, last)
        if silence is None:
            findings.append(found)
        else:
            used.add(silence)
    findings += [Finding(path, line, "words-ok", "say why: words-ok: REASON") for line in source.broken_silences]
    for line in source.silences.keys() - used:
        findings.append(Finding(path, line, "words-ok", "silences nothing: delete it"))
    return sorted(findings)


def _silence(silences: Mapping[int, bool], first: int, last: int) -> int | None:
    within = (line for line in range(first, last + 1) if line in silences)
    return next(within, first - 1 if silences.get(first - 1) else None)


def _all(path: str, source: Source) -> Iterator[tuple[Finding, int, int]]:
    """Each finding with the lines that a silence for it may stand on."""
    for block in source.blocks:
        for line, phrase, instead in _in_prose(block):
            yield Finding(path, line, phrase, instead), block.line, block.last
    for line, phrase, instead in (*_in_names(source), *_in_modules(path, source)):
        yield Finding(path, line, phrase, instead), line, line


def _in_prose(block: Block) -> Iterator[tuple[int, str, str]]:
    prose = re.sub(r"`+[^`]*`+|\]\([^)]*\)", lambda match: re.sub(r"[^\n]", "_", match[0]), block.text)
    if _begins_wrongly(block.kind, prose.lstrip(" \n|*_")):
        yield block.line, " ".join(block.text.split()[:4]), SUBJECT_FIRST
    # A phrase may go on in the next line: the rules see one line, and `starts` says where each of the block's begins.
    parts = [part.strip() for part in prose.split("\n")]
    starts = list(itertools.accumulate((len(part) + 1 for part in parts), initial=0))
    flat = " ".join(parts)
    for word, pattern in _PROSE:
        for match in pattern.finditer(flat):
            yield block.line + bisect.bisect_right(starts, match.start()) - 1, match[0], word.instead


def _begins_wrongly(kind: str, text: str) -> bool:
    if kind == "page":
        # A page may say "What it costs" in a heading and "That is why" in a paragraph.
        return bool(re.match(r"(Of\b(?! course)|Whether\b)", text))
    sentence = _FIRST_SENTENCE.match(text)
    if _HEADLESS.match(text) and sentence and not sentence[0].endswith("?"):
        return True
    clause = _BEFORE_MAIN_CLAUSE.match(text)
    without_main_clause = clause is not None and "," not in clause[0]
    return bool(_OF.match(text) or (kind == "docstring" and _SUBORDINATE.match(text) and without_main_clause))


def _in_names(source: Source) -> Iterator[tuple[int, str, str]]:
    for name, lines in source.names.items():
        word = _refused(name)
        if word and (word.strict or not name.startswith("test_")):
            yield lines[0], _times(name, lines), word.instead
    for name, lines in source.literals.items():
        word = _refused(name)
        if word and word.strict:
            yield lines[0], _times(name, lines), word.instead


def _times(name: str, lines: list[int]) -> str:
    return name if len(lines) == 1 else f"{name} ({len(lines)} times)"


@functools.cache
def _refused(name: str) -> Word | None:
    if name in ALLOWED_NAMES:
        return None
    parts = {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
    for word in WORDS:
        if parts & set(word.parts.split("|")) or (word.names and re.fullmatch(word.names, name)):
            return word
    return None


def _in_modules(path: str, source: Source) -> Iterator[tuple[int, str, str]]:
    product = re.match(r"(executor_server|client|proto)/", path)
    for word in WORDS:
        modules = word.modules
        if modules and product and re.fullmatch(modules, Path(path).stem):
            yield 1, path, f"a module's name: {word.instead}"
        if word.parts and path.endswith(".py") and _refused(Path(path).stem) is word:
            yield 1, path, f"a module's name: {word.instead}"
        for line, statement in source.imports if modules else ():
            if re.search(rf"\bexecutor_\S*\.({modules})\b|\bexecutor_\S+ import .*\b({modules})\b", statement):
                yield line, statement, f"a module's name: {word.instead}"


# ---------------------------------------------------------------------------------------------------------------------
# The command


def configured(root: Path) -> tuple[list[str], list[str]]:
    """Reads from pyproject.toml what is checked without arguments, and what never is."""
    table = tomllib.loads((root / "pyproject.toml").read_text()).get("tool", {}).get("words", {})
    return table.get("paths", []), table.get("exclude", [])


def files(root: Path, paths: Iterable[str], exclude: Iterable[str]) -> list[Path]:
    """The files of the paths; one that is named itself is not excluded. Raises FileNotFoundError, as a typing error in
    the list would otherwise switch a check off."""
    exclude = [*exclude, "*_pb2.py", "*_pb2_grpc.py"]
    found: set[Path] = set()
    named: set[Path] = set()
    for given in paths:
        path = (root / given).resolve()
        if not path.exists():
            raise FileNotFoundError(given)
        if path.is_file():
            named.add(path)
            continue
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
            found.update(Path(folder, name) for name in names)
    return sorted(named | {path for path in found if not _excluded(path.relative_to(root).as_posix(), exclude)})


def _excluded(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def _check_file(path: Path) -> list[Finding]:
    source = read(path)
    return [] if source is None else check(path.relative_to(ROOT).as_posix(), source)


def main(arguments: list[str]) -> int:
    """Prints the findings; 1 when there are any."""
    paths, exclude = configured(ROOT)
    given = [os.path.relpath(Path(argument).resolve(), ROOT) for argument in arguments]
    try:
        chosen = files(ROOT, given or paths, exclude)
    except FileNotFoundError as error:
        sys.stderr.write(f"words: no such path: {error}\n")
        return 2
    if len(chosen) < 20:
        results = list(map(_check_file, chosen))
    else:
        with ProcessPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            results = list(pool.map(_check_file, chosen, chunksize=8))
    findings = [finding for result in results for finding in result]
    sys.stdout.write("".join(f"{finding}\n" for finding in findings))
    if findings:
        sys.stderr.write(f"{len(findings)} findings. The words to use are in the table of {Path(__file__).name}.\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
