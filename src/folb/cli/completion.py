"""`folb completion`: a script that completes commands, options, names and runs in a shell.

The names are in the script, and the words of settings. Only runs are looked up when a key is pressed: the names of
directories, and of these only plain ones, because a shell would expand others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, get_args

from folb.cli import options as common

RUNS = "(runs)"  # stands for the names of runs


class Command(NamedTuple):
    options: dict[str, tuple[str, ...] | None]  # the words that each takes; None: it takes no value
    operands: tuple[str, ...]
    says: str


def add(commands: Any) -> None:
    says = "print a script that completes commands, options and names"
    common.command(commands, "completion", says, _completion).add_argument("shell", choices=("bash", "zsh", "fish"))


def _completion(options: argparse.Namespace) -> None:
    from folb.cli.main import parser

    commands = table(parser(tuning=True), _names())
    script = {"bash": bash, "zsh": zsh}.get(options.shell)
    print("\n".join(fish(commands) if script is None else script(commands, _values())))


def _names() -> dict[str, tuple[str, ...]]:
    """The words that can be given for the arguments of these names."""
    from folb.cli.listing import KINDS
    from folb.core.algorithm import SLOTS
    from folb.core.algorithms import ALGORITHMS
    from folb.data import DATASETS
    from folb.experiments.plan import SYSTEMS
    from folb.experiments.settings import settings
    from folb.experiments.tune import sweepable
    from folb.models import MODELS

    things: dict[str, Mapping[str, Callable[..., Any]]] = {"dataset": DATASETS, "model": MODELS, "system": SYSTEMS}
    known = {kind: [name for make in those.values() for name in settings(make)] for kind, those in things.items()}
    words = {kind: tuple(those) for kind, those in {"algorithms": ALGORITHMS, **things}.items()}
    return {
        **words,
        **{f"sweep_{path}": choices for path, choices in _values().items()},
        "algorithm": words["algorithms"],
        "run": (RUNS,),
        "what": (*KINDS, "parts", *SLOTS, *(name for own in words.values() for name in own)),
        "box": _given(sweepable()),
        "set": _given([*sweepable(), *(name for own in known.values() for name in own)]),
        "data info set": _given(known["dataset"]),
    }


def _given(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name}=" for name in dict.fromkeys(names))


def _values() -> dict[str, tuple[str, ...]]:
    """The words that an algorithm's settings may be, by their paths."""
    from folb.cli.tables import words_of
    from folb.core.algorithms import ALGORITHMS
    from folb.experiments.settings import algorithm_settings

    words: dict[str, dict[str, None]] = {}
    for make in ALGORITHMS.values():
        for path, one in algorithm_settings(make).items():
            kinds, named = (one.type, *get_args(one.type)), list(map(str, words_of(one.type)))
            none = ["none"] if named and type(None) in kinds else []
            named += ["true", "false"] if bool in kinds else []
            words.setdefault(path, {}).update(dict.fromkeys(named + none))
    return {path: tuple(choices) for path, choices in words.items() if choices}


def table(parser: argparse.ArgumentParser, names: Mapping[str, tuple[str, ...]]) -> dict[str, Command]:
    """Every command, such as "data info", and what can follow it; "" is before any command."""
    commands: dict[str, Command] = {}

    def visit(parser: argparse.ArgumentParser, path: str, says: str) -> None:
        options: dict[str, tuple[str, ...] | None] = {}
        operands: tuple[str, ...] = ()
        for action in parser._actions:
            known = names.get(f"{path} {action.dest}", names.get(action.dest, ()))
            words = tuple(map(str, action.choices)) if action.choices else known
            if isinstance(action, argparse._SubParsersAction):
                helps = {one.dest: one.help or "" for one in action._choices_actions}
                for name, inner in action.choices.items():
                    visit(inner, f"{path} {name}".strip(), helps.get(name, ""))
            if action.option_strings:
                options |= dict.fromkeys(action.option_strings, None if action.nargs == 0 else words)
            else:
                operands += words
        commands[path] = Command(options, operands, says)

    visit(parser, "", "")
    return commands


def bash(commands: Mapping[str, Command], values: Mapping[str, tuple[str, ...]]) -> list[str]:
    follow: dict[tuple[str, ...], list[str]] = {}  # the words that can follow options, and which options these are
    for path, command in commands.items():
        for option, words in command.options.items():
            if words is not None:
                follow.setdefault(words, []).append(f'"{path} {option}"')
    places = {
        "VALUES": (f"    {path}|*.{path}) echo {_quoted(choices)} ;;" for path, choices in values.items()),
        "GROUPS": ("|".join(sorted({path.partition(" ")[0] for path in commands if " " in path})),),
        "OPTIONS": (f"    {'|'.join(those)}) words={_quoted(words)} ;;" for words, those in follow.items()),
        "OPERANDS": (
            f'        "{path}") case "$cur" in -*) words={_quoted(tuple(command.options))} ;; '
            f"*) words={_quoted(command.operands)} ;; esac ;;"
            for path, command in commands.items()
        ),
    }
    script = BASH
    for place, lines in places.items():
        script = script.replace(f"@{place}@", "\n".join(lines))
    return script.splitlines()


BASH = """# folb completion bash > ~/.local/share/bash-completion/completions/folb
_folb_runs() {
  local path name
  echo last
  for path in "${FOLB_RUNS:-runs}"/*/environment.json; do
    name=${path%/environment.json} name=${name##*/}
    case "$name" in ''|*[!A-Za-z0-9_.-]*) ;; *) echo "$name" ;; esac
  done
}
_folb_values() {
  case "$1" in
@VALUES@
  esac
}
_folb() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command="" words="" before="" key=""
  (( COMP_CWORD > 1 )) && command=${COMP_WORDS[1]}
  case "$command" in @GROUPS@)
    (( COMP_CWORD > 2 )) && command="$command ${COMP_WORDS[2]}" ;;
  esac
  case "$cur" in  # KEY=VALUE is three words for bash, and one for zsh
    =) key=$prev cur="" ;;
    *=*) key=${cur%%=*} before="${cur%%=*}=" cur=${cur#*=} ;;
    *) case "$prev" in =) key=${COMP_WORDS[COMP_CWORD-2]} ;; esac ;;
  esac
  if [ -n "$key" ]; then words=$(_folb_values "$key"); else
  case "$command $prev" in
@OPTIONS@
    *)
      case "$command" in
@OPERANDS@
      esac ;;
  esac; fi
  case "$words" in "(runs)") words=$(_folb_runs) ;; esac
  case "$cur" in *,*) before=$before${cur%,*}, cur=${cur##*,} ;; esac
  COMPREPLY=( $(compgen -P "$before" -W "$words" -- "$cur") )
  case "${COMPREPLY[0]}" in *=) compopt -o nospace 2>/dev/null ;; esac
}
complete -o default -F _folb folb"""


def _quoted(words: tuple[str, ...]) -> str:
    return '"' + " ".join(words) + '"'


def zsh(commands: Mapping[str, Command], values: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The script for zsh, which takes bash's."""
    first = "# source <(folb completion zsh), or in a file that ~/.zshrc sources"
    load = [f"autoload -U +X {name} && {name}" for name in ("compinit", "bashcompinit")]
    return [first, *load, *bash(commands, values)[1:]]


def fish(commands: Mapping[str, Command]) -> Iterator[str]:
    yield "# folb completion fish > ~/.config/fish/completions/folb.fish"
    yield from FISH_RUNS
    for path, command in commands.items():
        *above, last = path.split(" ")
        if last:
            before = f"__fish_seen_subcommand_from {above[0]}" if above else "__fish_use_subcommand"
            yield f"complete -c folb -f -n {_fish(before)} -a {last} -d {_fish(command.says)}"
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in path.split(" ") if word)
        when = f"-n {_fish(seen or '__fish_use_subcommand')}"
        for option, words in command.options.items():
            kind, name = ("-l", option[2:]) if option.startswith("--") else ("-s", option[1:])
            takes = "" if words is None else " -r" if not words else f" -x -a {_fish(_choices(option, words))}"
            yield f"complete -c folb {when} {kind} {name}{takes}"
        is_group = not path or any(other.startswith(f"{path} ") for other in commands)  # its operands are commands
        if command.operands and not is_group:
            yield f"complete -c folb {when} -a {_fish(_choices('', command.operands))}"


FISH_RUNS = """function __folb_runs
  echo last
  set -l home runs
  set -q FOLB_RUNS; and test -n "$FOLB_RUNS"; and set home $FOLB_RUNS
  for path in $home/*/environment.json
    string match -r '^[A-Za-z0-9_.-]+$' (basename (dirname $path))
  end
end""".splitlines()


def _choices(option: str, words: tuple[str, ...]) -> str:
    if words == (RUNS,):
        return "(__folb_runs)"
    return f"(__fish_append , {' '.join(words)})" if option == "--algorithms" else " ".join(words)


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
