"""`dshard completion`: shell scripts that complete commands and options, generated from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from dshard.tools import report
from dshard.tools.cli.arguments import Commands, add_command

SHELLS = ("bash", "zsh")


def add_completion(commands: Commands, parser: argparse.ArgumentParser) -> None:
    """Add the command `completion`, which reads all commands of `parser` when it runs."""
    own = add_command(commands, "completion", "print a completion script", _HELP)
    own.add_argument("shell", choices=SHELLS, help="which one")
    own.add_argument("--json", action="store_true", help="print the words after each command, for machines")

    def command(arguments: argparse.Namespace) -> int:
        if arguments.json:
            report.data(dict(words_of(parser)))
        else:
            report.text(script(parser, arguments.shell))
        return 0

    own.set_defaults(command=command)


_HELP = 'Print a completion script for a shell: eval "$(dshard completion bash)".'


def words_of(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield for each command the words that may follow it: subcommands, options and choices."""
    words: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words += action.choices
            for name, below in action.choices.items():
                yield from words_of(below, f"{path} {name}".strip())
        else:
            words += action.option_strings or map(str, action.choices or ())
    yield path, words


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script for one shell; zsh runs the script of bash."""
    cases = "\n".join(f'    "{path}") words="{" ".join(words)}" ;;' for path, words in sorted(words_of(parser)))
    lines = [
        "_dshard() {",
        '  local path="" words="" word',
        '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
        '    case "$word" in -*) break ;; *) path="${path:+$path }$word" ;; esac',
        "  done",
        '  case "$path" in',
        cases,
        "  esac",
        '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))',
        '  [ ${#COMPREPLY[@]} -gt 0 ] || COMPREPLY=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}"))',
        "}",
        f"complete -F _dshard {parser.prog}",
    ]
    return "\n".join([*(["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []), *lines])
