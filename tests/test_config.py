"""A mistake in a config costs one line, at parse time, that names the key and what to do."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPO

from planning.cells import Registry, of_study, prebuilt_files
from planning.config import complete
from planning.registry import Engine, Format
from planning.values import ConfigError

SCHEMA = yaml.safe_load((REPO / "config/config.schema.yaml").read_text())
FORMATS = {
    "fp16": Format("hf", "transformers", "torch"),
    "ct2-int8": Format("ct2", "ctranslate2", "torch"),
    "gptq-int4": Format("gptq", "gptqmodel", "torch", parameters="gptq"),
    "awq-int4": Format("awq", "gptqmodel", "torch"),
    "gguf-f16": Format("gguf", "llama", "torch"),
    "only-gpu": Format("hf", "transformers", "torch", devices=("cuda",)),
}
ENGINES = {
    "transformers": Engine("torch", ("hf",), options={"dtype": {"type": "string"}}),
    "ctranslate2": Engine("torch", ("ct2",)),
    "gptqmodel": Engine("torch", ("gptq", "awq")),
    "llama": Engine("torch", ("gguf",)),
    "old": Engine("old", ("hf", "gptq"), python="2.7"),
    "many": Engine("torch", ("hf",), devices=("cuda",), many_gpus=True, options=None),
    "external": Engine("mlc_llm", ("hf",)),
    "theirs": Engine("tools", ("hf",), attached=True),
}
REGISTRY = Registry(FORMATS, ENGINES, ["torch", "tools", "old"])


def check(**changes: Any) -> dict[str, Any]:
    config = {"models": {"demo": {"source": "demo"}}, "formats": ["fp16", "ct2-int8"]} | changes
    return complete(config, SCHEMA, REGISTRY)


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
    formats = FORMATS | {"ct2-float16": FORMATS["fp16"]}
    study = complete({"models": {"demo": {"source": "demo"}}}, SCHEMA, replace(REGISTRY, formats=formats))
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
    registry = replace(REGISTRY, formats=FORMATS | {"legacy": Format("hf", "old", "old")})
    config = {"models": {"demo": {"source": "demo"}}, "formats": ["fp16", "legacy"]}
    with pytest.raises(ConfigError, match=r"formats: legacy wants Python 2\.7, and this is 3\.\d+; leave it out"):
        complete(config, SCHEMA, registry)
    study = complete(config | {"interpreters": {"old": sys.executable}}, SCHEMA, registry)
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
        (
            {"formats": ["zzz"]},
            "formats: unknown format 'zzz'; known: awq-int4, ct2-int8, fp16, gguf-f16, gptq-int4, only-gpu",
        ),
        ({"device": "gpu"}, "device: 'gpu' is not possible"),
        ({"device": "cpu", "formats": ["fp16", "only-gpu"]}, "formats: only-gpu does not run on device cpu"),
        (
            {"formats": ["fp16", "eetq-int8"]},
            "formats: eetq-int8 is not built here: EETQ's kernels end before compute capability 9.0, and its one wheel "
            "is for Python 3.10; take bnb-int8",
        ),
        ({"reference": "fp61"}, "reference: unknown format 'fp61'; did you mean 'fp16'?"),
        ({"interpreters": {"torch": "/nope/python"}}, "interpreters.torch: /nope/python is no program"),
        ({"texts": {"evaluation": "latin1.txt"}}, "texts.evaluation: latin1.txt is not UTF-8 at byte 1"),
        ({"gptq": {"group_size": "128"}}, "gptq.group_size: '128' is not possible; did you mean '128'?"),
        (
            {"interpreters": {1: "/bin/true"}},
            "interpreters: no environment is called 1; known: mlc_llm, old, tools",
        ),
        ({"quality_gate": 1e300}, "quality_gate: 1e+300 is greater than the maximum of 1000000"),
        ({"mlc": {"tool": "mlc_llm"}}, "mlc.tool: mlc_llm is not built here; name a python that has it"),
        ({"models": {7: {"source": "demo"}}}, "models: the name 7 is no text to YAML"),
        (
            {"models": {"a": {"source": {"path": "adapter"}}}},
            "models.a.source: adapter holds a config.json but no weig",
        ),
        ({"reference": "only-gpu"}, "models.demo: the reference 'only-gpu' is not among its formats"),
        ({"gguf_mixed": {"size": 1}}, "gguf_mixed.size: a size is that of a type, such as q4_k_m, or bits a weight of"),
        ({"gguf_mixed": {"bits": 4.5}}, "gguf_mixed: unknown key 'bits'; known: size"),
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


PREBUILT = {"layout": "gptq", "path": "bare"}


def demo(**prebuilt: Any) -> dict[str, Any]:
    return {"demo": {"source": "demo", "prebuilt": prebuilt}}


def test_cells() -> None:
    """Formats in order, each with its variants; the default run of each first; what is prebuilt last."""
    study = check(
        formats=["fp16", "gptq-int4"],
        models=demo(theirs=PREBUILT) | {"other": {"source": "demo", "formats": ["fp16", "g32"]}},
        variants={"g32": {"format": "gptq-int4", "group_size": 32}},
        runs={
            "half": {"engine": "transformers", "formats": ["fp16"], "options": {"dtype": "float16"}},
            "g": {"engine": "gptqmodel", "formats": ["g32", "theirs"]},
        },
    )
    found = list(of_study(study, REGISTRY))
    assert [(each.model, each.name, each.engine) for each in found] == [
        ("demo", "fp16", "transformers"),
        ("demo", "fp16@half", "transformers"),
        ("demo", "gptq-int4", "gptqmodel"),
        ("demo", "g32", "gptqmodel"),
        ("demo", "g32@g", "gptqmodel"),
        ("demo", "theirs", "gptqmodel"),
        ("demo", "theirs@g", "gptqmodel"),
        ("other", "fp16", "transformers"),
        ("other", "fp16@half", "transformers"),
        ("other", "g32", "gptqmodel"),
        ("other", "g32@g", "gptqmodel"),
    ]
    assert [each.options for each in found if each.options] == [{"dtype": "float16"}] * 2
    assert [each.name for each in found if each.prebuilt] == ["theirs", "theirs@g"]
    assert {each.gpus for each in found} == {1}


def test_a_servers_url_is_an_option_of_its_engine() -> None:
    url = "http://127.0.0.1:8080"
    study = check(
        runs={"t": {"engine": "theirs", "formats": ["fp16"], "url": url}},
        formats=["fp16"],
    )
    (cell,) = (each for each in of_study(study, REGISTRY) if each.run)
    assert cell.options == {"url": url}


def run(**words: Any) -> dict[str, Any]:
    return {"runs": {"x": {"engine": "transformers", "formats": ["fp16"]} | words}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (run(engine="gptqmodel"), "runs.x: gptqmodel does not load fp16 (hf); it loads gptq, awq"),
        (run(engine="vlm"), "runs.x: unknown engine 'vlm'; known: ctranslate2, external, gptqmodel, llama, many, old"),
        (run(engine="theirs"), "runs.x: theirs is a server that you run; say where with url: http://HOST:PORT"),
        (run(url="http://host:1"), "runs.x.url: transformers is started by Quantmill; leave url out"),
        (run(engine="theirs", url=8080), "runs.x.url: 8080 is not of type 'string'"),
        (run(engine="theirs", url="host:80"), "runs.x.url: 'host:80' is no URL of a server; write http://HOST:PORT"),
        (run(engine="theirs", url="http://[::1"), "runs.x.url: 'http://[::1' is no URL of a server; write http"),
        (run(engine="theirs", url="http://host:99999"), "runs.x.url: 'http://host:99999' is no URL of a server; write"),
        (
            run(engine="theirs", url="http://me:sk-1@host"),
            "runs.x.url: 'host' is no URL of a server; write http://HOST:PORT, and name the token apart from it",
        ),
        (run(formats=["fp61"]), "runs.x.formats: unknown format 'fp61'; did you mean 'fp16'?"),
        (run(formats=["only-gpu"]), "runs.x.formats: no model has only-gpu; add it to formats"),
        (run(formats=[]), "runs.x.formats: [] should be non-empty"),
        (run(options={"dtyp": "x"}), "runs.x.options: transformers has no option 'dtyp'; did you mean 'dtype'?"),
        (run(options={"dtype": 16}), "runs.x.options.dtype: 16 is not of type 'string'"),
        (run(options=["dtype"]), "runs.x.options: ['dtype'] is not of type 'object'"),
        (run(gpus=2), "runs.x.gpus: transformers uses one GPU; leave gpus out"),
        (run(gpus=0), "runs.x.gpus: 0 is less than the minimum of 1"),
        (run(engine="many", gpus=2) | {"device": "cpu"}, "runs.x: many does not run on device cpu; leave it out"),
        (run(engine="old"), "runs.x: old: wants Python 2.7, and this is "),
        (run(engine="external"), "runs.x: external: mlc_llm is not built here; name a python that has it under"),
        ({"runs": {"x": {"engine": "transformers"}}}, "runs.x: 'formats' is missing"),
        ({"runs": {"X y": {"engine": "transformers", "formats": ["fp16"]}}}, "runs: a name is small letters, digits"),
        ({"variants": {"fp16": {"format": "ct2-int8"}}}, "variants.fp16: a format has this name; choose another"),
        ({"variants": {"v": {"format": "gpt"}}}, "variants.v: unknown format 'gpt'"),
        ({"variants": {"v": {}}}, "variants.v: 'format' is missing"),
        ({"variants": {"v": {"format": "gptq-int4"}}}, "variants.v: is gptq-int4 itself; give it a parameter of its"),
        (
            {"variants": {"v": {"format": "gptq-int4", "group_siz": 32}}},
            "variants.v: gptq-int4 has no parameter 'group_siz'; did you mean 'group_size'?",
        ),
        ({"variants": {"v": {"format": "gptq-int4", "group_size": 7}}}, "variants.v.group_size: 7 is not one of"),
        ({"variants": {"v": {"format": "fp16", "bits": 3}}}, "variants.v: fp16 has no parameter 'bits'; it has none"),
        ({"variants": {4: {"format": "gptq-int4"}}}, "variants: the name 4 is no text to YAML; put it in quotes"),
        (
            {"variants": {"noise-floor": {"format": "gptq-int4", "group_size": 32}}},
            "variants.noise-floor: other files of Quantmill's have this name, or begin with it; choose another",
        ),
        ({"runs": {1: {"engine": "transformers", "formats": ["fp16"]}}}, "runs: the name 1 is no text to YAML; put"),
        ({"models": demo(**{"gate.json": PREBUILT})}, "models.demo.prebuilt.gate.json: other files of Quantmill's"),
        ({"models": demo(imatrix=PREBUILT)}, "models.demo.prebuilt.imatrix: other files of Quantmill's"),
        ({"models": demo(**{"latency-fp16": PREBUILT})}, "models.demo.prebuilt.latency-fp16: other files of Quantm"),
        ({"models": {"a": {"source": "demo", "prebuilt": {7: PREBUILT}}}}, "models.a.prebuilt: the name 7 is no text"),
        ({"models": demo(fp16=PREBUILT)}, "models.demo.prebuilt.fp16: a format has this name; choose another"),
        ({"models": demo(x=PREBUILT | {"path": "no"})}, "models.demo.prebuilt.x: there is no folder no"),
        (
            {"models": demo(x={"layout": "ct2", "path": "bare"})},
            "models.demo.prebuilt.x: bare holds no model.bin, so it is no ct2 artifact",
        ),
        ({"models": demo(x={"layout": "mlc", "path": "bare"})}, "models.demo.prebuilt.x: a prebuilt artifact is {lay"),
        (
            {"models": demo(x={"layout": "gguf", "path": "bare"})},
            "models.demo.prebuilt.x: bare holds no *.gguf, so it is no gguf artifact",
        ),
        (
            {"models": demo(x={"layout": "gguf", "path": "bare/config.json"})},
            "models.demo.prebuilt.x: there is no folder or *.gguf file bare/config.json",
        ),
        (
            {"models": demo(x={"layout": "gptq", "path": "bare/config.json"})},
            "models.demo.prebuilt.x: there is no folder bare/config.json",
        ),
        (
            {"models": demo(x={"layout": "gguf", "hub": "a/b"})},
            "models.demo.prebuilt.x.file: of the hub's gguf artifacts, name its file, such as NAME.gguf",
        ),
        (
            {"models": demo(x={"layout": "awq", "hub": "a/b", "file": "c"})},
            "models.demo.prebuilt.x.file: of the hub's awq artifacts, its files are known; leave file out",
        ),
    ],
)
def test_cells_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(**changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_prebuilt_gguf(tmp_path: Path) -> None:
    """A folder, a file, a part of a model that was split, or a file of the hub; and the files whose changes count."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    names = ["a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "README.md"]
    for name in names:
        (folder / name).write_text("")
    spellings = {
        "folder": ({"path": "theirs"}, names),
        "file": ({"path": "theirs/a.gguf"}, names[:1]),
        "part": ({"path": "theirs/b-00002-of-00002.gguf"}, names[1:3]),
        "hub": ({"hub": "acme/tiny", "file": "parts/b-00002-of-00002.gguf"}, []),
    }
    prebuilt = {name: {"layout": "gguf"} | words for name, (words, _) in spellings.items()}
    study = check(models=demo(**prebuilt))
    assert study["models"]["demo"]["prebuilt"]["hub"]["revision"] == "main"
    for name, (_, expected) in spellings.items():
        found = prebuilt_files(study["models"]["demo"]["prebuilt"][name])
        assert sorted(found) == sorted(Path("theirs") / each for each in expected)


def test_what_this_machine_has(tmp_path: Path) -> None:
    """Of `auto` what it means here; GPUs are refused where there are too few, not lowered."""
    config = {"models": {"demo": {"source": "demo"}}, "formats": ["fp16"]} | run(engine="many", gpus=2)
    here = replace(REGISTRY, device="cuda", gpus=2)
    assert complete(config, SCHEMA, here)["runs"]["x"]["gpus"] == 2
    with pytest.raises(ConfigError, match=r"runs.x.gpus: 2, and jobs may use 1; run with --resources gpu=2 hub=2"):
        complete(config, SCHEMA, replace(here, gpus=1))
    with pytest.raises(ConfigError, match=r"runs.x: many does not run on device cpu; leave it out"):
        complete(config, SCHEMA, replace(here, device="cpu"))
    either = replace(here, device="cpu", engines=ENGINES | {"many": Engine("torch", ("hf",), many_gpus=True)})
    with pytest.raises(ConfigError, match=r"runs.x.gpus: 2, and the device is cpu; leave gpus out"):
        complete(config, SCHEMA, either)
    (tmp_path / "bare/model.bin").touch()
    prebuilt = {"models": demo(x={"layout": "ct2", "path": "bare"}), "formats": ["fp16"]}
    for engine, line in (
        (Engine("torch", ("ct2",), devices=("cuda",)), "ctranslate2 does not run on device cpu; leave it out"),
        (Engine("old", ("ct2",), python="2.7"), "ctranslate2: wants Python 2.7"),
    ):
        lacking = replace(here, device="cpu", engines=ENGINES | {"ctranslate2": engine})
        with pytest.raises(ConfigError, match=rf"models.demo.prebuilt.x: {line}"):
            complete(prebuilt, SCHEMA, lacking)
    config = {"models": {"demo": {"source": "demo"}}, "formats": ["fp16", "only-gpu"]}
    with pytest.raises(ConfigError, match=r"formats: only-gpu does not run on device cpu; leave it out"):
        complete(config, SCHEMA, replace(here, device="cpu"))
    assert complete(config, SCHEMA, replace(here, device="auto"))["device"] == "auto"


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
        (["mmlu", "mmlu"], "tasks.names: ['mmlu', 'mmlu'] has non-unique elements"),
        ({"include": "nowhere"}, "tasks.include: there is no folder nowhere"),
        ({"include": "demo"}, "tasks.include: demo holds no .yaml, so no task"),
        (
            {"names": ["mmlu"], "metrics": {"mmul": "acc"}},
            "tasks.metrics: 'mmul' is not among the names; did you mean 'mmlu'?",
        ),
        ("mmlu", "tasks: 'mmlu' is not of type 'object'"),
    ],
)
def test_a_mistake_in_tasks_is_an_error_at_parse_time(tasks: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(tasks=tasks)
    assert str(refused.value).startswith(said)
