"""Values that no study has cost one line: numbers, names, paths, and what YAML accepts."""

import datetime
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPO
from workflows import SNAKEMAKE, study

from quantmill.plan.config import complete
from quantmill.plan.config_values import ConfigError, check_file, is_plain
from quantmill.plan.registry import LAYOUTS, Engine, Format, Registry, check_registry

SCHEMA = yaml.safe_load((REPO / "config/config.schema.yaml").read_text())
ENGINES = {"transformers": Engine("torch", ("hf",))}
REGISTRY = Registry({"fp16": Format("hf", "transformers", "torch", "build.fp16")}, ENGINES, LAYOUTS, ["torch"])


def refusal(**changes: Any) -> str:
    config = {"models": {"demo": {"source": "demo"}}, "formats": ["fp16"]} | changes
    with pytest.raises(ConfigError) as caught:
        complete(config, SCHEMA, REGISTRY)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder like the repository's root, with texts and models of unusual names."""
    shutil.copytree(REPO / "config", tmp_path / "config")
    for name in ("demo", "demo\n", "de{m}o", "d<resources>"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "pytorch_model.bin").write_text("")
    for name in ("a{model}.txt", "-a.txt", "a\nb.txt"):
        (tmp_path / name).write_text("A text.\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": float("nan")}, "seed: nan is not a finite number"),
        ({"latency": {"repeats": float("inf")}}, "latency.repeats: inf is not a finite number"),
        ({"latency": {"prompt_tokens": [1, float("-inf")]}}, "latency.prompt_tokens.1: -inf is not a finite number"),
        ({"max_perplexity_ratio": float("inf")}, "max_perplexity_ratio: inf is not a finite number"),
        ({"latency": {"repeats": 1e100}}, "latency.repeats: 1000"),
        ({"latency": {"processes": 10**6}}, "latency.processes: 1000000 is greater than the maximum of 1000"),
        ({"calibration": {"samples": 10**9}}, "calibration.samples: 1000000000 is greater"),
        ({"calibration": {"sequence_length": 10**9}}, "calibration.sequence_length: 1000000000 is greater"),
        ({"seed": 2**32}, "seed: 4294967296 is greater"),
        ({"memory_at": {"budget_gb": 24}}, "memory_at: 'context' is missing"),
        ({"memory_at": {"context": 100, "users": 0}}, "memory_at.users: 0 is less than the minimum of 1"),
        ({"memory_at": {"context": 0}}, "memory_at.context: 0 is less than the minimum of 1"),
        ({"memory_at": {"context": 10**8}}, "memory_at.context: 100000000 is greater"),
        ({"memory_at": {"context": 100, "budget_gb": 0}}, "memory_at.budget_gb: 0.0 is less than or equal to the min"),
        ({"memory_at": {"context": 100, "user": 4}}, "memory_at: unknown key 'user'; did you mean 'users'?"),
        ({"memory_at": 32768}, "memory_at: 32768 is not of type 'object'"),
        ({"budget_gb": 24}, "config: unknown key 'budget_gb'"),
        ({"latency": {"batch_sizes": list(range(1, 102))}}, "latency.batch_sizes: "),
        ({"models": {"a\n": {"source": "demo"}}}, r"models: the key 'a\n' has '\n'"),
        ({"models": {"a" * 101: {"source": "demo"}}}, "models: a model's name names its folder"),
        ({"models": {"a": {"source": {"hub": "x/y\n"}}}}, r"models.a.source.hub: 'x/y\n' has '\n'"),
        ({"models": {"a": {"source": {"hub": "x/" + "y" * 101}}}}, "models.a.source: a source is demo"),
        ({"models": {"a": {"source": {"path": "demo\n"}}}}, "models.a.source.path: 'demo\\n' has '\\n'"),
        ({"models": {"a": {"source": {"path": "de{m}o"}}}}, "models.a.source.path: 'de{m}o' has {"),
        ({"models": {"a": {"source": {"path": "d<resources>"}}}}, "models.a.source.path: 'd<resources>' has <"),
        ({"models": {"a": {"source": {"path": "\ud800"}}}}, r"models.a.source.path: '\ud800' has '\ud800'"),
        ({"models": {"a": {"source": {"path": "\udcff"}}}}, r"models.a.source.path: '\udcff' has '\udcff'"),
        ({"models": {"a": {"source": {"path": "x" * 300}}}}, "models.a.source: xxx"),
        ({"models": {"a": {"source": {"random": "x" * 300}}}}, "models.a.source: xxx"),
        ({"models": {"a": {"source": {"hub": "x/y", "revision": "--help"}}}}, "models.a.source.revision: '--help' be"),
        ({"texts": {"prompts": "a{model}.txt"}}, "texts.prompts: 'a{model}.txt' has {, which Snakemake interprets"),
        ({"texts": {"prompts": "a\nb.txt"}}, r"texts.prompts: 'a\nb.txt' has '\n'"),
        ({"texts": {"prompts": "a\0"}}, r"texts.prompts: 'a\x00' has '\x00'"),
        ({"texts": {"prompts": "-a.txt"}}, "texts.prompts: '-a.txt' begins with -, which programs take for an option"),
        ({"texts": {"prompts": "x" * 300}}, "texts.prompts: xxx"),
        ({"texts": {"prompts": "/proc/self/mem"}}, "texts.prompts: /proc/self/mem: Input/output error"),
        (
            {"texts": {"evaluation": {"hub": "x/y", "revision": "r", "file": "f", "join": "\0"}}},
            "texts.evaluation.join",
        ),
        (
            {"texts": {"evaluation": {"hub": "x/y", "revision": "r", "file": "-f"}}},
            "texts.evaluation.file: '-f' begins",
        ),
        ({"interpreters": {"torch": "/x/{y}"}}, "interpreters.torch: '/x/{y}' has {"),
        ({"models": ["a"]}, "models: ['a'] is not of type 'object'"),
        ({"models": 7}, "models: 7 is not of type 'object'"),
        ({"seed": datetime.date(2020, 1, 1)}, "seed: a date in YAML, which no key takes; put a text in quotes"),
        ({"seed": 1j}, "seed: a complex in YAML"),
        ({"x\x1b[2J": 1}, r"config: the key 'x\x1b[2J' has '\x1b'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_values_that_no_study_has(changes: dict[str, Any], message: str) -> None:
    assert refusal(**changes).startswith(message)


def test_no_pattern_of_the_schema_lets_a_newline_through() -> None:
    patterns = re.findall(r"pattern: (\".*\")", (REPO / "config/config.schema.yaml").read_text())
    assert len(patterns) == 7
    for pattern in map(json.loads, patterns):
        fits = [text for text in ("a", "a/a") if re.search(pattern, text)]
        assert fits
        assert not any(re.search(pattern, f"{text}\n") for text in fits)


WHOLE = {
    "models": {
        "a": {"source": "demo", "formats": ["fp16"]},
        "b": {"source": {"path": "demo"}},
        "h": {"source": {"hub": "x/y", "revision": "main"}},
        "r": {"source": {"random": "demo/config.json"}},
    },
    "formats": ["fp16"],
    "reference": "fp16",
    "device": "auto",
    "texts": {
        "evaluation": {"hub": "x/y", "revision": "r", "file": "f", "column": "c", "documents": 3, "join": "\n"},
        "prompts": "config/prompts.txt",
    },
    "mlc": {"tool": "auto"},
    "latency": {"new_tokens": 3, "decode": "generate", "prompt_tokens": [1]},
    "interpreters": {"torch": "/bin/true"},
}
ANYTHING = [
    *(None, True, 0, -1, -0.0, 1.5, 1e300, float("nan"), 10**400, "", " ", "x", "\n", "\0", "\ud800", "{x}", "-x", "."),
    *("x" * 900, b"x", [], {}, [None], {"x": None}, {1: 2}, {None: 1}, {(1, 2): 3}, {"x"}, (1,), ["fp16"] * 2),
    *({"path": None}, {"path": ""}, {"path": "/"}, {"path": "/proc/self"}, {"random": "/dev/zero"}, "/dev/zero"),
]


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of every value in a config."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


@pytest.mark.parametrize("path", list(places(WHOLE)), ids=lambda path: ".".join(map(str, path)))
def test_anything_anywhere_is_a_study_or_one_line(path: tuple) -> None:
    for value in ANYTHING:
        config = deepcopy(WHOLE)
        inner = config
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        try:
            assert complete(config, SCHEMA, REGISTRY)["models"]
        except ConfigError as error:
            assert str(error).isprintable()
            assert len(str(error)) < 2000


@pytest.mark.parametrize("config", [["models"], "models", None, 7])
def test_a_config_that_is_no_mapping(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"config: a .* not keys and values"):
        complete(config, SCHEMA, REGISTRY)


def test_what_stands_between_documents_may_be_lines() -> None:
    text = {"hub": "x/y", "revision": "r", "file": "f", "join": "\n--{x}--\n"}
    config = {"models": {"d": {"source": "demo"}}, "formats": ["fp16"], "texts": {"evaluation": text}}
    assert complete(config, SCHEMA, REGISTRY)["texts"]["evaluation"]["join"] == "\n--{x}--\n"


def test_a_formats_name_that_no_file_can_have() -> None:
    for name, message in (("a" * 101, "at most 100 letters"), ("a\n", "a name is small letters")):
        with pytest.raises(ConfigError, match=message):
            formats = {name: REGISTRY.formats["fp16"]}
            check_registry(formats, ENGINES, LAYOUTS, ["torch"], ["transformers"], ["build.fp16"])


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("foo-int", "", "engine 'foo-int': scripts/quantmill/engines/foo_int.py is missing"),
        ("foo", "quantised", "engine 'foo': scripts/quantmill/engines/quantised.py is missing"),
        ("own", "quantized", "engine 'own': it has a module of its own; leave implementation='quantized' out"),
        ("foo", "quantized", None),
    ],
)
def test_an_engine_has_a_module(name: str, module: str, message: str | None) -> None:
    engines = {name: Engine("torch", ("hf",), implementation=module)}
    with nullcontext() if message is None else pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_registry({}, engines, LAYOUTS, ["torch"], ["quantized", "own"], [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "models:\n  a: {source: demo}\n  b: {source: demo}\n  a: {}\n",
            "the key 'a' occurs 2 times (line 2 and line 4)",
        ),
        ("models: {}\nseed: 1\nseed: 1\nseed: 2\n", "'seed' occurs 3 times (line 2 and line 3 and line 4); keep one"),
        ('{"models": {"a": {}, "a": {}}}', "the key 'a' occurs 2 times; keep one"),
        ('{\n\t"models": {"a": {"source": 1, "source": 2}}}', "'source' occurs 2 times; keep one"),
        ("- {x: [{y: 1, y: 2}]}\n", "the key 'y' occurs 2 times"),
        ("models: [\n", "is not YAML (while parsing a flow node"),
        ("a: b: c\n", "is not YAML (mapping values are not allowed here"),
        ("a: *b\n", "is not YAML (found undefined alias 'b'"),
        ("[" * 100_000, "nested too deep"),
        ("a: '" + "x" * 2**20 + "'", "over 1 MiB"),
        (b"models: \xff\n", "is not YAML ('utf-8' codec"),
    ],
)
def test_files_that_are_no_study(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "study.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        check_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x: &x {source: demo}\nmodels: {a: *x, b: *x, c: {<<: *x, source: {path: p}}}\n",
        "a: &a {x: 1}\nb: &b {y: 2}\nc: {<<: *a, <<: *b}\n",
        '{\n\t"models": {"a": {"source": 1}, "b": {"source": 1}}}',
        "a: &a [*a]\n",
        "l0: &l0 [x]\n" + "".join(f"l{n + 1}: &l{n + 1} [{', '.join([f'*l{n}'] * 9)}]\n" for n in range(30)),
    ],
)
def test_anchors_merges_and_json_are_no_keys_twice(tmp_path: Path, text: str) -> None:
    (tmp_path / "study.yaml").write_text(text)
    check_file(tmp_path / "study.yaml")


@pytest.mark.parametrize("name", ["a{b}", "a\nb", "<a>", "a\udcff", "a\x1bb"])
def test_files_of_a_source_that_snakemake_cannot_take(name: str) -> None:
    assert not is_plain(name)
    assert is_plain("models/a b-é.safetensors")


def test_sources_hold_files_of_any_name(
    call: Callable, checkout: Callable, tools_python: Path, torch_python: Path
) -> None:
    root = checkout()
    twice = "models:\n  a: {source: {path: demo}}\n  a: {source: {path: demo}}\n"
    options = ["--cores", "1", "artifacts/a/safetensors", "--configfile", "study.yaml"]
    study(root, twice)
    result = call(SNAKEMAKE, *options, cwd=root)
    assert result.returncode == 1
    line = f"config error: {root}/study.yaml: the key 'a' occurs 2 times (line 2 and line 3); keep one"
    assert result.stderr.splitlines()[-1] == line
    study(root, "models: {a: {source: {path: demo}}}\n")
    names = [
        b"\xff\xfe.txt",
        b"a\nb.json",
        b"-rf",
        b"{model}.txt",
        b"<resources>.txt",
        b"<x>",
        b"$(touch x).txt",
        b"';'",
    ]
    for name in names:
        Path(root, "demo", os.fsdecode(name)).write_text("{}")
    (root / "demo/loop").symlink_to("loop")
    os.mkfifo(root / "demo/fifo")
    result = call(SNAKEMAKE, *options, cwd=root)
    assert result.returncode == 0, result.stderr
    for folder in ("source", "safetensors"):
        assert not {os.fsencode(path.name) for path in (root / "artifacts/a" / folder).iterdir()} & set(names)
    left_out = json.loads((root / "artifacts/a/source/quantmill.json").read_text())["parameters"]["left_out"]
    assert len(left_out) == len(names) + 2
    assert {r"\udcff\udcfe.txt", r"a\nb.json", "-rf", "loop", "fifo"} <= set(left_out)
    assert not (root / "x").exists()
