"""The contract of the drop-in toolchain: whatever it accepts exists in TensorRT-LLM 1.2.1 with the same form.

The flags are read from the parsers that the entry points really use, and compared with the raw data files.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trtllm_workshop
from trtllm_workshop.commands import api, apis, commands, enums, flags

PACKAGE = Path(trtllm_workshop.__file__).parent
REFERENCE = PACKAGE / "reference"
DATA = PACKAGE / "data"
RAW = {
    name: entry
    for path in sorted(DATA.glob("trtllm_cli*.json"))
    for name, entry in json.loads(path.read_text(encoding="utf-8"))["commands"].items()
}
# Programs whose sub-command may be left out; the parser behind them is the sub-command's.
DEFAULT_SUBCOMMAND = {"trtllm-serve": "trtllm-serve serve"}


def entry_points() -> list[Path]:
    scripts = [path for path in (REFERENCE / "bin").glob("*") if path.is_file() and path.suffix in ("", ".py")]
    return sorted(scripts + [path for path in (REFERENCE / "examples").rglob("*.py") if path.name != "__init__.py"])


def official_name(path: Path) -> str:
    name = path.relative_to(REFERENCE).as_posix()
    program = name.removeprefix("bin/")
    return name if name.startswith("examples/") else DEFAULT_SUBCOMMAND.get(program, program)


class _Reached(BaseException):
    """Raised in place of parsing; not an Exception, so that no handler of the command swallows it."""


def parser_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser that the entry point hands its arguments to, caught at the moment it would parse."""
    caught: list[argparse.ArgumentParser] = []

    def parse_args(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        caught.append(self)
        raise _Reached

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", [str(path)])
    with pytest.raises(_Reached):
        runpy.run_path(str(path), run_name="__main__")
    return caught[0]


ENTRY_POINTS = pytest.mark.parametrize("path", entry_points(), ids=official_name)


@ENTRY_POINTS
def test_every_accepted_flag_is_official_with_the_same_type_choices_and_default(path, monkeypatch):
    raw = {flag["flag"]: flag for flag in RAW[official_name(path)]["flags"]}
    parser = parser_of(path, monkeypatch)
    assert not parser.allow_abbrev
    accepted = 0
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        name = action.option_strings[0] if action.option_strings else str(action.metavar)
        assert name in raw, f"{name} is not an official flag of {official_name(path)}"
        want = raw[name]
        spellings = [want["flag"], *want.get("aliases", []), *want.get("negative", [])]
        assert not action.option_strings or action.option_strings == spellings
        if type(action).__name__ == "_Refuse":
            continue
        accepted += 1
        assert action.required == bool(want.get("required")), name
        if want.get("absent_unless_given") or want.get("positional"):
            assert want.get("positional") or action.default is argparse.SUPPRESS
        else:
            assert action.default == want.get("default"), name
        switch = want.get("action") in ("store_true", "store_false", "pair")
        assert (action.nargs == 0) == switch, name
        if not switch:
            kind = {"int": int, "float": float}.get(want["type"])
            assert kind is None or (action.type("3") == kind(3) and type(action.type("3")) is kind), name
            assert want["type"] not in ("str", "path") or action.type("3") == "3", name
            choices = [c for c in want.get("choices", []) if c is not None] + want.get("more_choices", [])
            assert list(action.choices or []) == choices, name
            assert action.nargs == want.get("nargs"), name
    assert accepted, "the entry point accepts no official flag at all"


@ENTRY_POINTS
def test_every_other_official_flag_is_refused_by_name(path, monkeypatch):
    raw = {flag["flag"] for flag in RAW[official_name(path)]["flags"] if not flag.get("positional")}
    parser = parser_of(path, monkeypatch)
    assert raw <= set(parser._option_string_actions)


@ENTRY_POINTS
def test_a_made_up_flag_ends_the_real_command_with_code_2_and_the_nearest_flag(path):
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}
    name = next(iter(flags(official_name(path)))) if official_name(path) != "trtllm-serve serve" else "--tokenizer"
    done = subprocess.run(
        [sys.executable, str(path), name + "x", "1"], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"error: unrecognized arguments: {name}x: did you mean {name}?" in done.stderr


def test_there_are_entry_points_to_check():
    names = {official_name(path) for path in entry_points()}
    assert {"trtllm-build", "examples/run.py", "examples/models/core/llama/convert_checkpoint.py"} <= names
    assert names <= set(RAW), "every entry point needs recorded facts"


# The Python side ------------------------------------------------------------------------------------------------------


def _subclasses(owner: type) -> list[type]:
    return [child for direct in owner.__subclasses__() for child in (direct, *_subclasses(direct))]


def test_every_configuration_field_is_official_with_the_same_default():
    pytest.importorskip("torch")
    from trtllm_workshop.reference import configs, sampling_params

    classes = {child.__name__: child for child in _subclasses(configs.OfficialConfig)}
    assert {"SamplingParams", "BuildConfig", "KvCacheConfig"} <= set(classes) and sampling_params
    for name, owner in classes.items():
        if name == "PluginConfig":
            continue  # its fields are flags of trtllm-build, see below
        official = api(getattr(owner, "api_name", "") or name).parameters
        for field, info in owner.model_fields.items():
            assert field in official, f"{name}.{field} is not official"
            default = info.default
            shown = f"{type(default).__name__}()" if isinstance(default, configs.OfficialConfig) else default
            assert shown == official[field].default, (
                f"{name}.{field}: {default!r}, official {official[field].default!r}"
            )


def test_every_plugin_field_is_a_plugin_flag_of_trtllm_build():
    pytest.importorskip("torch")
    from trtllm_workshop.reference.configs import PluginConfig

    words = {"enable": True, "disable": False}
    table = flags("trtllm-build")
    for field, info in PluginConfig.model_fields.items():
        flag = table["--" + field]
        assert flag.group == "plugin"
        assert info.default == words.get(flag.default, flag.default), field


def _same_parameters(function: Any, name: str) -> None:
    official = api(name).parameters
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        assert parameter.name in official, f"{name}: {parameter.name} is not official"
        want = official[parameter.name]
        assert (parameter.default is parameter.empty) == want.required, f"{name}: {parameter.name}"
        if not want.required:
            assert parameter.default == want.default, f"{name}: {parameter.name}"


def test_every_parameter_of_the_engine_llm_is_official():
    pytest.importorskip("torch")
    from trtllm_workshop.reference import llm

    official = api("tensorrt_llm._tensorrt_engine.LLM")
    _same_parameters(llm.LLM.__init__, official.name)
    given = [name for name in inspect.signature(llm.LLM.__init__).parameters if name not in ("self", "kwargs")]
    assert tuple(given) == official.positional[: len(given)], "positional arguments keep the official order"
    assert set(llm.IMPLEMENTED) <= set(official.parameters)
    for method in ("generate", "generate_async", "save", "shutdown", "get_stats"):
        if hasattr(llm.LLM, method):
            _same_parameters(getattr(llm.LLM, method), f"LLM.{method}")


def test_results_have_official_fields_only():
    pytest.importorskip("torch")
    from trtllm_workshop.reference.outputs import CompletionOutput, RequestOutput

    official = {text.split(" ")[0] for text in api("RequestOutput").attributes}
    assert {field.name for field in dataclasses.fields(RequestOutput)} <= official
    assert {field.name for field in dataclasses.fields(CompletionOutput)} <= set(api("CompletionOutput").parameters)


@pytest.mark.parametrize("name", ["ModelRunnerCpp", "ModelRunner"])
def test_runners_refuse_made_up_arguments_by_name(name, tmp_path):
    pytest.importorskip("torch")
    from trtllm_workshop.reference import runner

    with pytest.raises(ValueError, match=r"max_batchsize.*max_batch_size|invalid argument: max_batchsize"):
        getattr(runner, name).from_dir(str(tmp_path), max_batchsize=3)


# The data files agree with themselves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(RAW))
def test_recorded_flags_are_consistent(name):
    known = {
        "flag", "aliases", "negative", "positional", "type", "nargs", "action", "const", "dest", "choices", "more_choices",
        "open_choices", "default", "default_symbol", "absent_unless_given", "minimum", "must_exist", "required", "group",
        "deprecated", "note", "confidence",
    }  # fmt: skip
    python = {"int": int, "float": (int, float), "str": str, "path": str, "bool": bool}
    spellings: list[str] = []
    for raw in RAW[name]["flags"]:
        assert set(raw) <= known, raw
        flag = flags(name)[raw["flag"]]
        spellings.extend(flag.spellings)
        assert flag.type in python, raw
        default = flag.default
        for value in default if isinstance(default, list) else [default]:
            assert value is None or isinstance(value, python[flag.type]), raw
            assert flag.choices is None or value is None or value in flag.choices, raw
        assert flag.is_switch == (raw.get("action") in ("store_true", "store_false", "pair")), raw
        assert (flag.action == "pair") == bool(flag.negative), raw
        assert not (flag.required and default is not None), raw
    assert len(spellings) == len(set(spellings)), "a spelling belongs to two flags"
    entry = commands()[name]
    assert not set(entry.removed) & set(spellings) and not set(entry.later) & set(spellings)
    assert all(flag in spellings for group in entry.one_of for flag in group)
    assert (
        RAW[name].get("sources") and RAW[name].get("confidence") in ("high", "medium", "low") and RAW[name].get("why")
    )


def test_recorded_signatures_are_consistent():
    raw = json.loads((DATA / "trtllm_api.json").read_text(encoding="utf-8"))
    for name, signature in apis().items():
        assert set(signature.positional) <= set(signature.parameters), name
        assert not set(signature.extra_keywords) & set(signature.parameters), name
        assert not set(signature.later) & set(signature.parameters), name
        entries = raw["entries"][name].get("parameters", []) + raw["shared"].get(raw["entries"][name].get("shared"), [])
        assert len(entries) == len(signature.parameters), f"{name}: a parameter is recorded twice"
        assert raw["entries"][name]["sources"] and raw["entries"][name]["confidence"], name
        assert signature.only_on is None or signature.only_on in apis()
    assert "FP8" in enums()["QuantAlgo"]


def test_build_flags_and_build_config_agree():
    config, table = api("BuildConfig").parameters, flags("trtllm-build")
    shared = [name for name in config if f"--{name}" in table and table[f"--{name}"].group != "plugin"]
    assert len(shared) > 15
    different = {"speculative_decoding_mode"}  # a name on the command line, an enumeration in Python
    for name in set(shared) - different:
        assert config[name].default == table[f"--{name}"].default, name
