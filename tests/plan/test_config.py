"""A mistake in a config costs one line, at parse time, that names the key and what to do."""

import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_registry import ENGINES, FORMATS, REGISTRY, SCHEMA, check, folders, run  # noqa: F401
from conftest import REPO

from quantmill.plan.config import complete
from quantmill.plan.config_values import ConfigError
from quantmill.plan.registry import Format


def test_defaults_are_filled_in() -> None:
    formats = FORMATS | {"ct2-float16": FORMATS["fp16"]}
    study = complete({"models": {"demo": {"source": "demo"}}}, SCHEMA, replace(REGISTRY, formats=formats))
    assert study["reference"] == "fp16"
    protocol = {"new_tokens": 200, "repeats": 3, "processes": 3, "decode": "generate"}
    assert study["latency"] == protocol | {"prompt_tokens": [512, 2048], "batch_sizes": [1]}
    assert study["texts"]["prompts"] == "config/prompts.txt"
    assert study["models"]["demo"]["formats"] == ["fp16", "ct2-int8", "ct2-float16"]


def test_a_model_may_have_its_own_formats() -> None:
    study = check(models={"a": {"source": "demo", "formats": ["fp16"]}, "b": {"source": "demo"}})
    assert study["models"]["a"]["formats"] == ["fp16"]
    assert study["models"]["b"]["formats"] == ["fp16", "ct2-int8"]


def test_a_format_whose_environment_wants_another_python() -> None:
    registry = replace(REGISTRY, formats=FORMATS | {"legacy": Format("hf", "old", "old", "build.fp16")})
    config = {"models": {"demo": {"source": "demo"}}, "formats": ["fp16", "legacy"]}
    with pytest.raises(ConfigError, match=r"formats: legacy needs Python 2\.7, and this is 3\.\d+; remove it"):
        complete(config, SCHEMA, registry)
    study = complete(config | {"interpreters": {"old": sys.executable}}, SCHEMA, registry)
    assert study["models"]["demo"]["formats"] == ["fp16", "legacy"]


def test_a_written_out_default_changes_nothing() -> None:
    written = {
        "seed": 0,
        "max_perplexity_ratio": 1,
        "latency": {"processes": 3.0, "new_tokens": 200},
        "gptq": {"sym": True},
    }
    assert repr(check(**written)) == repr(check(max_perplexity_ratio=1.0))


def test_whole_numbers_are_integers_in_lists_too() -> None:
    runs = {"x": {"engine": "slots", "formats": ["fp16"], "options": {"parallel": 4}}}
    serving = {"concurrency": [1, 4.0], "rates": [2], "prompt_tokens": 64.0, "new_tokens": [8.0, 16]}
    written = {"latency": {"batch_sizes": [4.0]}, "loads": serving, "runs": runs}
    found = check(**written)
    assert repr(found["latency"]["batch_sizes"]) == "[4]"
    as_found = {name: repr(found["loads"][name]) for name in serving}
    assert as_found == {"concurrency": "[1, 4]", "rates": "[2.0]", "prompt_tokens": "64", "new_tokens": "[8, 16]"}
    assert written["latency"]["batch_sizes"] == [4.0]  # the config itself stays


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
        (
            {"formats": ["zzz"]},
            "formats: unknown format 'zzz'; known: awq-int4, ct2-int8, fp16, gguf-f16, gptq-int4, only-gpu",
        ),
        ({"device": "gpu"}, "device: 'gpu' is not possible"),
        ({"device": "cpu", "formats": ["fp16", "only-gpu"]}, "formats: only-gpu does not run on device cpu"),
        (
            {"formats": ["fp16", "eetq-int8"]},
            "formats: eetq-int8 is not built here: EETQ has no kernels for compute capability 9.0 and only a wheel for "
            "Python 3.10; use bnb-int8",
        ),
        (
            {"formats": ["fp16", "exl2-4.0bpw"]},
            "formats: exl2-4.0bpw is not built here: ExLlamaV3 replaces ExLlamaV2, by the same author; use exl3-4.0bpw",
        ),
        ({"reference": "fp61"}, "reference: unknown format 'fp61'; did you mean 'fp16'?"),
        ({"interpreters": {"torch": "/nope/python"}}, "interpreters.torch: /nope/python is not a program"),
        ({"interpreters": {"torch": "./pipe"}}, "interpreters.torch: ./pipe is not a program"),
        ({"texts": {"prompts": "pipe"}}, "texts.prompts: pipe: is a pipe, not a file"),
        ({"texts": {"calibration": "/dev/zero"}}, "texts.calibration: /dev/zero: is a device, not a file"),
        (
            {"texts": {"evaluation": "/proc/self/status"}},
            "texts.evaluation: /proc/self/status: its size is not that of",
        ),
        ({"models": {"a": {"source": {"path": "piped"}}}}, "models.a: piped/config.json: is a pipe, not a file"),
        ({"models": {"a": {"source": {"random": "pipe"}}}}, "models.a: pipe: is a pipe, not a file"),
        (
            {"models": {"a": {"source": {"path": "piped-weights"}}}},
            "models.a: piped-weights/model.safetensors: is a pipe, not a file",
        ),
        ({"texts": {"evaluation": "latin1.txt"}}, "texts.evaluation: latin1.txt is not UTF-8 at byte 1"),
        ({"gptq": {"group_size": "128"}}, "gptq.group_size: '128' is not possible; did you mean '128'?"),
        ({"interpreters": {1: "/bin/true"}}, "interpreters: the name 1 is not text in YAML; put it in quotes"),
        ({"max_perplexity_ratio": 1e300}, "max_perplexity_ratio: 1e+300 is greater than the maximum of 1000000"),
        ({"mlc": {"tool": "mlc_llm"}}, "mlc.tool: mlc_llm is not built here; name a python that has it"),
        ({"models": {7: {"source": "demo"}}}, "models: the name 7 is not text in YAML"),
        (run(options={1: "x"}), "runs.x.options: the name 1 is not text in YAML; put it in quotes"),
        (run(engine="many", options={"a": {True: 1}}), "runs.x.options.a: the name True is not text in YAML"),
        ({"variants": {"v": {"format": "gptq-int4", 4: 4}}}, "variants.v: the name 4 is not text in YAML"),
        (
            {"variants": {"v": {"format": "gptq-int4", "group_size": 32}}},
            "variants.v: no model has gptq-int4; add it to formats",
        ),
        ({"models": {"a": {"source": {"path": "adapter"}}}}, "models.a.source: adapter has a config.json but no weig"),
        ({"reference": "only-gpu"}, "models.demo: the reference 'only-gpu' is not among its formats"),
        ({"gguf_mixed": {"size": 1}}, "gguf_mixed.size: a size is that of a type, such as q4_k_m, or bits a weight of"),
        ({"gguf_mixed": {"bits": 4.5}}, "gguf_mixed: unknown key 'bits'; known: size"),
        ({"latency": {"new_tokens": 1}}, "latency.new_tokens: 1 is less than the minimum of 2"),
        ({"latency": {"batch_sizes": [0]}}, "latency.batch_sizes.0: 0 is less than the minimum of 1"),
        ({"interpreters": {"torhc": "/x"}}, "interpreters: no environment is called 'torhc'; did you mean 'torch'?"),
        ({"texts": {"prompts": "nope.txt"}}, "texts.prompts: nope.txt does not exist"),
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
        ({"models": {"a": {"source": {"path": "config"}}}}, "models.a.source: config has no config.json"),
        ({"models": {"a": {"source": {"path": "bare"}}}}, "models.a.source: bare has a config.json but no weights"),
        ({"models": {"a": {"source": {"random": "x.json"}}}}, "models.a.source.random: x.json does not exist"),
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


def test_the_study_that_the_readme_shows_is_one(call: Callable, checkout: Callable[[], Path]) -> None:
    """With a model that is there."""
    root = checkout()
    shown = re.search(r"^    models: .*\n(?:    \w.*\n){3}", (REPO / "README.md").read_text(), re.MULTILINE)
    assert shown
    (root / "my-text.txt").write_text((root / "config/evaluation.txt").read_text())
    (root / "mine.yaml").write_text(textwrap.dedent(shown[0]).replace("/models/my-model", "demo"))
    result = call(REPO / ".venv/bin/snakemake", "-n", "report", "--configfile", "mine.yaml", cwd=root)
    assert result.returncode == 0, result.stderr
    assert "artifacts/my-model/gguf-q4_k_m" in result.stdout + result.stderr


def test_tasks_are_a_list_of_names_or_have_options() -> None:
    defaults = {"chat_template": False, "metrics": {}}
    assert check()["tasks"] == defaults | {"names": []}
    assert check(tasks=["arc_easy", "mmlu"])["tasks"] == defaults | {"names": ["arc_easy", "mmlu"]}
    assert check(tasks={"names": ["mmlu"], "limit": 200})["tasks"] == defaults | {"names": ["mmlu"], "limit": 200}


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ({"names": ["mmlu"], "limit": 0}, "tasks.limit: 0 is less than the minimum of 1"),
        ({"names": ["mmlu"], "limits": 2}, "tasks: unknown key 'limits'; did you mean 'limit'?"),
        (["../mmlu"], "tasks.names.0: a task's name is letters, digits"),
        (["my-task", "my_task"], "tasks.names: my-task and my_task would share their columns; leave one out"),
        (["mmlu", "mmlu"], "tasks.names: ['mmlu', 'mmlu'] has non-unique elements"),
        ({"include": "nowhere"}, "tasks.include: there is no folder nowhere"),
        ({"include": "demo"}, "tasks.include: demo has no .yaml, so no tasks"),
        (
            {"names": ["mmlu"], "metrics": {"mmul": "acc"}},
            "tasks.metrics: 'mmul' is not among the names; did you mean 'mmlu'?",
        ),
        ("mmlu", "tasks: 'mmlu' is not of type 'object'"),
    ],
)
def test_a_mistake_in_tasks_is_one_line(tasks: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(tasks=tasks)
    assert str(refused.value).startswith(said)
