"""`tierd completion`: print a completion script for a shell, generated from the parsers.

One table says which words may follow which; each shell's script is written from that table.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import Final, NamedTuple

SHELLS: Final = {
    "bash": "source <(tierd completion bash)",
    "zsh": "source <(tierd completion zsh), after compinit",
    "fish": "tierd completion fish > ~/.config/fish/completions/tierd.fish",
}
"""Shells, and how to enable completion in each."""


class Word(NamedTuple):
    """A word that may come next, and its help."""

    text: str
    help: str


class CompletionPoint(NamedTuple):
    """The words that may follow the commands in `path`, and the values of their options."""

    path: str
    words: list[Word]
    values: dict[str, list[str]]
    """Options and their choices; no choices: a file."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "completion",
        help="print the shell completion of this command",
        description="Print a script for a shell that completes commands, options and values.",
        epilog="\n".join(f"{shell:<5} {line}" for shell, line in SHELLS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script; return the exit status."""
    # Imported here, since the parser of all commands imports this module.
    from tierd.cli.main import COMMANDS, parser_of

    found = list(places(parser_of(COMMANDS)))
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](found))
    return 0


def places(parser: argparse.ArgumentParser, path: str = "") -> Iterator[CompletionPoint]:
    """Yield the table of a parser and of all its commands, each before its subcommands."""
    words: list[Word] = []
    values: dict[str, list[str]] = {}
    below: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                words.append(Word(name, _plain(helps.get(name, ""))))
                below.append((f"{path} {name}".strip(), child))
        elif action.option_strings:
            words += [Word(option, _plain(action.help or "")) for option in action.option_strings]
            if action.nargs != 0:
                choices = [str(choice) for choice in action.choices or ()]
                values.update(dict.fromkeys(action.option_strings, choices))
        else:
            words += [Word(str(choice), "") for choice in action.choices or ()]
    yield CompletionPoint(path, words, values)
    for name, child in below:
        yield from places(child, name)


def _plain(text: str) -> str:
    """Return a help text without argparse's formatting, up to its first colon or semicolon."""
    return text.replace("%%", "%").split(";")[0].split(":")[0].split(" (default")[0]


_BASH: Final = """\
_tierd() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} at='' word i
  for ((i = 1; i < COMP_CWORD; i++)); do
    word=${{at:+$at }}${{COMP_WORDS[i]}}
    case $word in {paths}) at=$word ;; esac
  done
  case "$at $prev" in
{values}
  esac
  case $at in
{words}
  esac
  # If no word of tierd matches, complete a file.
  ((${{#COMPREPLY[@]}})) || COMPREPLY=($(compgen -f -- "$cur"))
}}
complete -o filenames -F _tierd tierd"""


def _bash(found: list[CompletionPoint]) -> str:
    values = [
        f"    {shlex.quote(f'{place.path} {option}')}) COMPREPLY=($(compgen -W "
        f'{shlex.quote(" ".join(choices))} -- "$cur")); return ;;'
        for place in found
        for option, choices in place.values.items()
        if choices
    ]
    files = [
        shlex.quote(f"{place.path} {option}")
        for place in found
        for option, choices in place.values.items()
        if not choices
    ]
    if files:
        values.append(f'    {"|".join(files)}) COMPREPLY=($(compgen -f -- "$cur")); return ;;')
    words = [
        f"    {shlex.quote(place.path)}) COMPREPLY=($(compgen -W "
        f'{shlex.quote(" ".join(word.text for word in place.words))} -- "$cur")) ;;'
        for place in found
    ]
    return _BASH.format(
        paths="|".join(shlex.quote(place.path) for place in found if place.path),
        values="\n".join(values),
        words="\n".join(words),
    )


def _zsh(found: list[CompletionPoint]) -> str:
    return f"autoload -Uz bashcompinit && bashcompinit\n{_bash(found)}"


def _fish(found: list[CompletionPoint]) -> str:
    lines = ["complete -c tierd -f"]
    for place in found:
        names = place.path.split()
        below = [word.text for word in place.words if not word.text.startswith("-")]
        tests = [f"__fish_seen_subcommand_from {name}" for name in names]
        if below:
            tests.append(f"not __fish_seen_subcommand_from {' '.join(below)}")
        when = f"-n {shlex.quote('; and '.join(tests))}" if tests else ""
        for word in place.words:
            option = word.text.lstrip("-")
            if word.text.startswith("--"):
                name = f"-l {option}"
            elif word.text.startswith("-"):
                name = f"-s {option}"
            else:
                name = f"-a {option}"
            taken = place.values.get(word.text)
            value = (
                "" if taken is None else f"-x -a {shlex.quote(' '.join(taken))}" if taken else "-rF"
            )
            parts = ["complete -c tierd", when, name, value, f"-d {shlex.quote(word.help)}"]
            lines.append(" ".join(part for part in parts if part))
    return "\n".join(lines)
