"""A mistake in a config costs one line, at parse time, that names the key and what to do."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPO

from planning.config import ConfigError, Format, checked

SCHEMA = yaml.safe_load((REPO / "config/config.schema.yaml").read_text())
FORMATS = {
    "fp16": Format("torch", "transformers"),
    "ct2-int8": Format("torch", "ctranslate2"),
    "only-gpu": Format("torch", "transformers", devices=("cuda",)),
}


def check(**changes: Any) -> dict[str, Any]:
    config = {"models": {"demo": {"source": "demo"}}, "formats": ["fp16", "ct2-int8"]} | changes
    return checked(config, SCHEMA, FORMATS, ["torch", "tools"])


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder like the repository's root, with a few models that lack something."""
    shutil.copytree(REPO / "config", tmp_path / "config")
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").write_text("{}")
    (tmp_path / "demo" / "pytorch_model.bin").write_text("")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "config.json").write_text("{}")
    (tmp_path / "adapter" / "adapter_model.safetensors").write_text("")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin1.txt").write_bytes("déjà vu".encode("latin-1"))
    monkeypatch.chdir(tmp_path)


def test_defaults_are_filled_in() -> None:
    study = checked({"models": {"demo": {"source": "demo"}}}, SCHEMA, FORMATS | {"ct2-float16": FORMATS["fp16"]}, [])
    assert study["reference"] == "fp16"
    protocol = {"new_tokens": 200, "repeats": 3, "processes": 3, "decode": "captured"}
    assert study["latency"] == protocol | {"prompt_tokens": [512, 2048], "batch_sizes": [1]}
    assert study["texts"]["prompts"] == "config/prompts.txt"
    assert study["models"]["demo"]["formats"] == ["fp16", "ct2-int8", "ct2-float16"]


def test_a_model_may_have_its_own_formats() -> None:
    study = check(models={"a": {"source": "demo", "formats": ["fp16"]}, "b": {"source": "demo"}})
    assert study["models"]["a"]["formats"] == ["fp16"]
    assert study["models"]["b"]["formats"] == ["fp16", "ct2-int8"]


def test_a_format_whose_environment_wants_another_python() -> None:
    formats = FORMATS | {"legacy": Format("old", "transformers", python="2.7")}
    config = {"models": {"demo": {"source": "demo"}}, "formats": ["fp16", "legacy"]}
    with pytest.raises(ConfigError, match=r"formats: legacy wants Python 2\.7, and this is 3\.\d+; leave it out"):
        checked(config, SCHEMA, formats, ["old"])
    study = checked(config | {"interpreters": {"old": sys.executable}}, SCHEMA, formats, ["old"])
    assert study["models"]["demo"]["formats"] == ["fp16", "legacy"]


def test_a_default_that_is_written_out_is_the_same_study() -> None:
    written = {"seed": 0, "quality_gate": 1, "latency": {"processes": 3.0, "new_tokens": 200}, "gptq": {"sym": True}}
    assert repr(check(**written)) == repr(check(quality_gate=1.0))


def test_a_key_without_a_value_has_its_default() -> None:
    assert check(interpreters=None, latency=None)["latency"]["new_tokens"] == 200


def test_random_weights_need_no_reference() -> None:
    assert check(models={"r": {"source": {"random": "bare"}, "formats": ["ct2-int8"]}})


def test_texts_of_a_model_of_the_hub() -> None:
    config = {"models": {"h": {"source": {"hub": "x/y"}}, "d": {"source": "demo"}}}
    models = check(**config)["models"]
    assert models["h"]["source"]["revision"] == "main"
    assert models["h"]["texts"]["evaluation"]["hub"] == "Salesforce/wikitext"
    assert models["h"]["texts"]["calibration"]["hub"] != "Salesforce/wikitext"
    assert models["d"]["texts"]["evaluation"] == "config/evaluation.txt"
    models = check(**config, texts={"evaluation": "config/evaluation.txt"})["models"]
    assert models["h"]["texts"]["evaluation"] == "config/evaluation.txt"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"formts": ["fp16"]}, "config: unknown key 'formts'; did you mean 'formats'?"),
        ({"latency": {"new_tokns": 3}}, "latency: unknown key 'new_tokns'; did you mean 'new_tokens'?"),
        ({"formats": ["fp16", "ct2-int9"]}, "formats: unknown format 'ct2-int9'; did you mean 'ct2-int8'?"),
        ({"formats": ["zzz"]}, "formats: unknown format 'zzz'; known: ct2-int8, fp16, only-gpu"),
        ({"device": "gpu"}, "device: 'gpu' is not possible"),
        ({"device": "cpu", "formats": ["fp16", "only-gpu"]}, "formats: only-gpu does not run on device cpu"),
        ({"reference": "fp61"}, "reference: unknown format 'fp61'; did you mean 'fp16'?"),
        ({"interpreters": {"torch": "/nope/python"}}, "interpreters.torch: /nope/python is no program"),
        ({"texts": {"evaluation": "latin1.txt"}}, "texts.evaluation: latin1.txt is not UTF-8 at byte 1"),
        ({"gptq": {"group_size": "128"}}, "gptq.group_size: '128' is not possible; did you mean '128'?"),
        ({"interpreters": {1: "/bin/true"}}, "interpreters: no environment is called 1; known: tools, torch"),
        ({"quality_gate": 1e300}, "quality_gate: 1e+300 is greater than the maximum of 1000000"),
        ({"mlc": {"tool": "mlc_llm"}}, "mlc.tool: mlc_llm is not built here; name a python that has it"),
        ({"models": {7: {"source": "demo"}}}, "models: the name 7 is no text to YAML"),
        (
            {"models": {"a": {"source": {"path": "adapter"}}}},
            "models.a.source: adapter holds a config.json but no weig",
        ),
        ({"reference": "only-gpu"}, "models.demo: the reference 'only-gpu' is not among its formats"),
        ({"latency": {"new_tokens": 1}}, "latency.new_tokens: 1 is less than the minimum of 2"),
        ({"latency": {"batch_sizes": [0]}}, "latency.batch_sizes.0: 0 is less than the minimum of 1"),
        ({"interpreters": {"torhc": "/x"}}, "interpreters: no environment is called 'torhc'; did you mean 'torch'?"),
        ({"texts": {"prompts": "nope.txt"}}, "texts.prompts: nope.txt is not there"),
        ({"texts": {"prompts": "empty.txt"}}, "texts.prompts: empty.txt is empty"),
        ({"models": {"a": {}}}, "models.a: 'source' is missing"),
        ({"models": {"a/b": {"source": "demo"}}}, "models: a model's name names its folder"),
        ({"models": {"report": {"source": "demo"}}}, "models: a model's name names its folder"),
        ({"models": {"a": {"source": "dmo"}}}, "models.a.source: a source is demo, {path: FOLDER}, {hub: ORG"),
        ({"models": {"a": {"source": {"hub": "x/y", "path": "z"}}}}, "models.a.source: a source is demo"),
        ({"models": {"a": {"source": {"hub": "a b"}}}}, "models.a.source: a source is demo"),
        ({"models": {"a": {"source": {"hub": "x/y", "revision": 7}}}}, "models.a.source: a source is demo"),
        ({"models": {"texts": {"source": "demo"}}}, "models: a model's name names its folder"),
        ({"texts": {"evaluation": {"hub": "x/y", "file": "z"}}}, "texts.evaluation: a text is a file, or {hub:"),
        ({"texts": {"prompts": {"hub": "x/y"}}}, "texts.prompts: "),
        ({"models": {"a": {"source": {"path": "x", "random": "y"}}}}, "models.a.source: a source is demo"),
        ({"models": {"a": {"source": {"path": "nowhere"}}}}, "models.a.source: there is no folder nowhere"),
        ({"models": {"a": {"source": {"path": "config"}}}}, "models.a.source: config holds no config.json"),
        ({"models": {"a": {"source": {"path": "bare"}}}}, "models.a.source: bare holds a config.json but no weights"),
        ({"models": {"a": {"source": {"random": "x.json"}}}}, "models.a.source.random: x.json is not there"),
    ],
)
def test_mistakes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(**changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_snakemake_ends_with_the_line_and_nothing_else(call: Callable, checkout: Callable[[], Path]) -> None:
    snakemake = REPO / ".venv" / "bin" / "snakemake"
    result = call(snakemake, "-n", "report", "--config", "formats=[fp16,ct2-int9]", cwd=checkout())
    assert result.returncode == 1
    assert (
        result.stderr.splitlines()[-1] == "config error: formats: unknown format 'ct2-int9'; did you mean 'ct2-int8'?"
    )
    assert "Traceback" not in result.stderr


def test_a_study_of_ones_own_replaces_the_demo(call: Callable, checkout: Callable[[], Path]) -> None:
    root = checkout()
    (root / "mine.yaml").write_text("models: {other: {source: {path: demo}}}\n")
    result = call(REPO / ".venv/bin/snakemake", "-n", "report", "--configfile", "mine.yaml", cwd=root)
    assert result.returncode == 0, result.stderr
    assert "artifacts/other/fp16" in result.stdout + result.stderr
    assert "artifacts/demo" not in result.stdout + result.stderr


FORMAT_FILE = """
FORMATS["copy16"] = Format(env="torch", engine="transformers")


rule copy16:
    input:
        env=environment("tools"),
        source="artifacts/{model}/safetensors",
    output:
        directory("artifacts/{model}/{format}"),
    wildcard_constraints:
        format="copy16",
    params:
        program=program("build_fp16.py"),
        python=python("tools"),
    shell:
        "{params.python:q} {params.program[0]} {input.source} {output}"
"""


@pytest.fixture(scope="module")
def dry_run(call: Callable, checkout: Callable[[], Path]) -> Callable[[str], Any]:
    """What Snakemake says to a study with the format of a rules/formats/copy.smk that holds this text."""
    root = checkout()

    def run(text: str) -> Any:
        (root / "rules/formats/copy.smk").write_text(text)
        snakemake = REPO / ".venv" / "bin" / "snakemake"
        return call(snakemake, "-n", "report", "--config", "formats=[fp16,ct2-int8,copy16]", cwd=root)

    return run


def test_a_format_file_that_forgets_nothing(dry_run: Callable[[str], Any]) -> None:
    result = dry_run(FORMAT_FILE)
    assert result.returncode == 0, result.stderr
    assert "artifacts/demo/quality/copy16.json" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        (
            'FORMATS["copy16"] = Format(env="torch", engine="transformers")',
            "",
            "config error: formats: unknown format 'copy16'; rules/formats/copy.smk makes it, but FORMATS['copy16'] = "
            "Format(env=..., engine=...) is missing there",
        ),
        (
            FORMAT_FILE[FORMAT_FILE.index("rule copy16") :],
            "",
            "error: format 'copy16': a rule that makes it is missing; its output is to be "
            'directory("artifacts/{model}/copy16")',
        ),
        (
            '    wildcard_constraints:\n        format="copy16",\n',
            "",
            "error: format 'ct2-int8': made by the rules copy16 and ct2; where an output has {format}, the rule's "
            "wildcard_constraints say which formats it makes",
        ),
        (
            'engine="transformers"',
            'engine="transformer"',
            "error: format 'copy16': its engine, scripts/engines/transformer.py with a class Engine, is missing; "
            "did you mean 'transformers'?",
        ),
        (
            'engine="transformers"',
            'engine="static_cache"',
            "error: format 'copy16': its engine, scripts/engines/static_cache.py with a class Engine, is missing; "
            "known: autogptq, ctranslate2, gptqmodel, quantmill_tvm, transformers",
        ),
        (
            'env="torch"',
            'env="torhc"',
            "error: format 'copy16': the pins of its environment, envs/torhc.txt, are missing; did you mean 'torch'?",
        ),
        (
            'environment("tools")',
            'environment("tolls")',
            "error: rules/formats/copy.smk: the pins of the environment 'tolls', envs/tolls.txt, are missing; "
            "did you mean 'tools'?",
        ),
        (
            'python("tools")',
            'python("tolls")',
            "error: rules/formats/copy.smk: the pins of the environment 'tolls', envs/tolls.txt, are missing; "
            "did you mean 'tools'?",
        ),
        (
            "build_fp16.py",
            "build_copy16.py",
            "error: rules/formats/copy.smk: the program scripts/build_copy16.py is missing",
        ),
        (
            "engine=",
            "engin=",
            "error: rules/formats/copy.smk: Format knows no 'engin'; did you mean 'engine'?",
        ),
        (
            ', engine="transformers"',
            "",
            "error: rules/formats/copy.smk: Format lacks 'engine'; write Format(env=..., engine=...)",
        ),
        (
            'FORMATS["copy16"]',
            'FORMATS["Copy16"]',
            "error: format 'Copy16': a name is small letters, digits, '.', '_' and '-'; rename it",
        ),
    ],
)
def test_a_format_file_that_forgets_something(dry_run: Callable[[str], Any], right: str, wrong: str, line: str) -> None:
    assert right in FORMAT_FILE
    result = dry_run(FORMAT_FILE.replace(right, wrong))
    assert result.returncode == 1
    told = [text for text in result.stderr.splitlines() if text and not text.startswith(("Using ", "Config file "))]
    assert told == [line]
