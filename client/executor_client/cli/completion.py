"""Completion of commands and options of `executor` in bash, zsh and fish."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

_SCRIPT = """\
[ -n "$ZSH_VERSION" ] && autoload -Uz bashcompinit && bashcompinit
_executor() {
  local word=${COMP_WORDS[COMP_CWORD]} each words=""
  for each in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case $each in
%(cases)s
    esac
    [ -n "$words" ] && break
  done
  COMPREPLY=($(compgen -W "${words:-%(first)s}" -- "$word"))
}
complete -o default -F _executor executor"""


SHELLS = ("bash", "zsh", "fish")


def completion(shell: str) -> str:
    """Returns a script for a shell that completes commands, their options, and otherwise files."""
    from executor_client.cli.arguments import make_parser

    parser = make_parser()
    first = _words(parser)
    commands = {name: _words(command) for name, command in _commands(parser).items()}
    for name, command in _commands(parser).items():
        for part in _commands(command).values():  # `env build`
            commands[name] |= _words(part)
    if shell != "fish":
        cases = [f'      {name}) words="{" ".join(words)}";;' for name, words in commands.items()]
        return _SCRIPT % {"cases": "\n".join(cases), "first": " ".join(first)}
    seen = "__fish_seen_subcommand_from"
    parts = {f"not {seen} {' '.join(commands)}": first} | {f"{seen} {name}": words for name, words in commands.items()}
    lines = (
        f"complete -c executor -n '{condition}' {f'-l {word[2:]}' if word[0] == '-' else f'-a {word}'} -d '{text}'"
        for condition, words in parts.items()
        for word, text in words.items()
    )
    return "\n".join(lines)


def _subparsers(parser: argparse.ArgumentParser) -> list[argparse._SubParsersAction[argparse.ArgumentParser]]:
    return [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    return {name: command for each in _subparsers(parser) for name, command in each.choices.items()}


def _words(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Returns the commands and options of a parser with their help, escaped for single quotes."""
    expand = parser._get_formatter()._expand_help
    words = {part.dest: part for each in _subparsers(parser) for part in each._choices_actions}
    words |= {name: each for each in parser._actions for name in each.option_strings if name.startswith("--")}
    return {word: expand(each).replace("'", "\\'") for word, each in words.items() if each.help != argparse.SUPPRESS}
