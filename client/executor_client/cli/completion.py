"""Completion of commands and options of `executor` in bash and zsh."""

from __future__ import annotations

import argparse

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


def completion() -> str:
    """Returns a script for the shell: the commands, the options of each, and files where neither fits."""
    from executor_client.cli.arguments import make_parser

    parser = make_parser()
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    cases = [f'      {name}) words="{_options(command)}";;' for name, command in commands.choices.items()]
    first = f"{' '.join(commands.choices)} {_options(parser)}"
    return _SCRIPT % {"cases": "\n".join(cases), "first": first}


def _options(parser: argparse.ArgumentParser) -> str:
    return " ".join(name for action in parser._actions for name in action.option_strings if name.startswith("--"))
