"""Make a `RunConfig` from flags and YAML. Flags override the file, and the file overrides the preset."""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentError
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from stickymoe import reading
from stickymoe.errors import ConfigError, shown, unknown
from stickymoe.runs.config import (
    RENAMED,
    SECTIONS,
    RunConfig,
    current_names,
)
from stickymoe.runs.presets import RECOMMENDED, RECOMMENDED_SIZES
from stickymoe.runs.presets import preset as preset_settings
from stickymoe.variants import hypers, variant_names

_HELP = "See stickymoe train --help."


def read_config(
    flags: list[str] | None = None,
    *,
    preset: str | None = None,
    variant: str | None = None,
    recommended: bool = False,
    file: Path | None = None,
) -> RunConfig:
    """The config of the `preset`, the YAML `file`, the `variant` and the `flags`, each overriding the one before.

    `recommended` is the variant that docs/frontier.md recommends, with its settings.
    """
    settings = read_yaml(file) if file is not None else {}
    if recommended:
        if variant is not None or "variant" in settings:
            given = variant or _variant_in(settings)
            raise ConfigError(f"--recommended chooses the variant, but '{given}' was given: omit one of them.")
        settings["variant"] = RECOMMENDED | RECOMMENDED_SIZES.get(preset or settings.get("preset", ""), {})
    elif variant is not None and sorted(variant.split("+")) != sorted(_variant_in(settings).split("+")):
        settings.pop("variant", None)  # the hyper-parameters in the file belong to another variant
        settings["variant"] = {"name": variant}
    if preset is not None:
        settings["preset"] = preset
    return config_from(settings, flags or [], source=f" (in {file})" if file is not None else "")


def config_from(settings: dict[str, Any], flags: list[str] | None = None, source: str = "") -> RunConfig:
    """The config of nested `settings`, which override their optional `preset`, overridden by `flags`.

    `source` is added to the message of an error.
    """
    settings = dict(settings)
    if isinstance(settings.get("variant"), str):
        settings["variant"] = {"name": settings["variant"]}
    _require_sections(settings, source)
    if "variant" in settings:
        settings["variant"] = current_names(settings["variant"])
    parser = config_parser(_variant_in(settings), settings.pop("preset", None))
    try:
        if settings:
            parser.set_defaults(_flat(parser.parse_object(settings, defaults=False).as_dict()))
        parsed = parser.parse_args([_current_flag(flag) for flag in flags or []])
    except ArgumentError as e:
        raise ConfigError(_one_line(str(e), parser, source)) from None
    values: dict[str, Any] = parsed.as_dict()
    try:
        return RunConfig.from_dict(values)
    except ConfigError as e:
        raise ConfigError(f"{e}{source}") from None


def _require_sections(settings: dict[str, Any], source: str) -> None:
    """Sections are mappings of plain values, a preset is a name, and only a path or cache folder may be null."""
    for key, value in settings.items():
        if key in (*SECTIONS, "variant") and not isinstance(value, dict):
            raise ConfigError(f"{key}: got {shown(value)}, expected settings such as '{key}: {{name: value}}'.{source}")
        if key in ("preset", "seed") and (value is None or (key == "preset" and not isinstance(value, str))):
            raise ConfigError(f"{key}: got {shown(value)}, expected {'a name' if key == 'preset' else 'int'}.{source}")
        for name, inner in value.items() if isinstance(value, dict) else ():
            if inner is None and (key, name) not in (("data", "path"), ("data", "cache_dir")):
                raise ConfigError(f"{key}.{name}: got null, expected a value.{source}")


def _current_flag(flag: str) -> str:
    """A flag of an earlier version under its current name."""
    name, equals, value = flag.partition("=")
    setting = name.removeprefix("--variant.")
    return f"--variant.{RENAMED[setting]}{equals}{value}" if name != setting in RENAMED else flag


def _variant_in(settings: dict[str, Any]) -> str:
    section = settings.get("variant")
    if isinstance(section, str):
        return section
    return str(section.get("name", "vanilla")) if isinstance(section, dict) else "vanilla"


def config_parser(variant: str, preset: str | None = None) -> ArgumentParser:
    """Typed flags for every setting of a run of `variant`; defaults come from the preset."""
    parser = ArgumentParser(exit_on_error=False, add_help=False, usage="")
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)
    parser.add_argument("--variant.name", type=str, default=variant, help=SUPPRESS)  # the command's own --variant
    settings = parser.add_argument_group(f"The variant {variant}")
    for name, hyper in hypers(variant).items():
        settings.add_argument(f"--variant.{name}", type=hyper.type, default=hyper.default, help=hyper.help)
    parser.add_argument(
        "--seed", type=int, default=RunConfig().seed, help="seed of the initial weights and the batch order"
    )
    if preset is not None:
        parser.set_defaults(_flat(preset_settings(preset)))
    return parser


def read_yaml(file: Path) -> dict[str, Any]:
    """The sections of a YAML file."""
    settings = reading.read_yaml(file, ConfigError)
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: got {shown(settings)}, expected sections such as 'train:'.")
    return settings


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def _one_line(message: str, parser: ArgumentParser, source: str) -> str:
    """Reword a message of the parser."""
    text = " ".join(message.split())
    known = [a.option_strings[-1] for a in parser._actions if a.option_strings and a.help != SUPPRESS]
    known = [option for option in known if "." in option]
    if m := re.search(r"unrecognized arguments: (\S+)", text):
        return _no_such_setting(m[1].partition("=")[0], known, parser)
    if m := re.search(r"Group '(\w+)' does not accept (?:option|nested key) '(\S+?)'", text):
        return _no_such_setting(f"{m[1]}.{m[2]}", [k.removeprefix("--") for k in known], parser) + source
    if m := re.search(r"""(?:[Kk]ey|[Oo]ption) ["'](\S+?)["'] is not (?:expected|accepted)""", text):
        return _no_such_setting(m[1], [k.removeprefix("--") for k in known], parser) + source
    if m := re.search(r'Parser key "([^"]+)":', text):
        if m[1] in (*SECTIONS, "variant"):
            return f"--{m[1]} expects a YAML file with its settings; to set one of them, use --{m[1]}.NAME VALUE."
        given = re.search(r"(?:Got value|value): (.+?)(?: -|$)", text)
        return f"{m[1]}: got {shown(given[1] if given else '')}, expected {_expected(parser, m[1])}.{source}"
    return reading.one_line(text) + source


def _no_such_setting(name: str, known: list[str], parser: ArgumentParser) -> str:
    """Name similar settings, or the variants that have this setting."""
    chosen = parser.get_default("variant.name")
    hyper = name.removeprefix("--").removeprefix("variant.")
    owners = [n for n in variant_names() if hyper in hypers(n)]
    if "variant." in name and owners:
        has = "has" if len(owners) == 1 else "have"
        return f"Unknown setting '{name}' of {chosen}; {', '.join(owners)} {has} it."
    return unknown("setting", name, known, or_else=_HELP)


def _expected(parser: ArgumentParser, key: str) -> str:
    """The type of a setting, in plain English."""
    for action in parser._actions:
        if action.dest == key:
            name = str(getattr(action, "_typehint", None) or getattr(action, "type", None) or "another value")
            if name.startswith("tuple"):
                return "a list such as [2,3]"
            if choices := re.findall(r"'([^']+)'", name.removeprefix("<class ").removesuffix(">")):
                return " or ".join(choices)
            return name
    return "another value"
