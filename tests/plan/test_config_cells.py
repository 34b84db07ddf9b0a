"""Rows of a study: its cells, and those that cannot be, each refused in one line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_registry import ENGINES, PREBUILT, REGISTRY, SCHEMA, check, demo, folders, run  # noqa: F401

from quantmill.plan.cells import of_study, prebuilt_files
from quantmill.plan.config import complete
from quantmill.plan.config_values import ConfigError
from quantmill.plan.registry import Engine


def test_cells() -> None:
    """Formats in order, each with its variants; the default run of each first; what is prebuilt last."""
    study = check(
        formats=["fp16", "gptq-int4"],
        models=demo(theirs=PREBUILT, fast=PREBUILT | {"engine": "quick"})
        | {"other": {"source": "demo", "formats": ["fp16", "g32"]}},
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
        ("demo", "fast", "quick"),
        ("other", "fp16", "transformers"),
        ("other", "fp16@half", "transformers"),
        ("other", "g32", "gptqmodel"),
        ("other", "g32@g", "gptqmodel"),
    ]
    assert [each.options for each in found if each.options] == [{"dtype": "float16"}] * 2
    assert [each.name for each in found if each.prebuilt] == ["theirs", "theirs@g", "fast"]
    assert {each.gpus for each in found} == {1}


def test_a_servers_url_is_an_option_of_its_engine() -> None:
    url = "http://127.0.0.1:8080"
    study = check(runs={"t": {"engine": "theirs", "formats": ["fp16"], "url": url}}, formats=["fp16"])
    (cell,) = (each for each in of_study(study, REGISTRY) if each.run)
    assert cell.options == {"url": url}


def test_variables_of_a_run_are_recorded_with_its_options() -> None:
    study = check(**run(options={"dtype": "float16"}, environment={"A": 0, "TOKENIZERS_PARALLELISM": "false"}))
    (cell,) = (each for each in of_study(study, REGISTRY) if each.run)
    assert cell.options == {"dtype": "float16", "environment": {"A": "0", "TOKENIZERS_PARALLELISM": "false"}}


@pytest.mark.parametrize(("options", "concurrency"), [({"parallel": 4}, [1, 16]), ({}, [1]), ({}, [])])
def test_loads_fit_the_slots_of_a_server(options: dict, concurrency: list[int]) -> None:
    study = check(**run(engine="slots", options=options), loads={"concurrency": concurrency, "burst": 59})
    assert study["loads"]["concurrency"] == concurrency


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            run(engine="slots") | {"loads": {"concurrency": [1, 16]}},
            "runs.x: slots answers one request at a time, and loads.concurrency keeps 16 in flight; set options: "
            "{parallel: 16}",
        ),
        (run(engine="gptqmodel"), "runs.x: gptqmodel does not load fp16 (hf); it loads gptq, awq"),
        (run(engine="vlm"), "runs.x: unknown engine 'vlm'; known: ctranslate2, external, gptqmodel, llama, many, old"),
        (run(engine="theirs"), "runs.x: theirs needs the address of a running server; add url: http://HOST:PORT"),
        (run(url="http://host:1"), "runs.x.url: transformers is started by Quantmill; remove url"),
        (run(engine="theirs", url=8080), "runs.x.url: 8080 is not of type 'string'"),
        (
            run(engine="theirs", url="host:80"),
            "runs.x.url: 'host:80' is not the URL of a server; write http://HOST:PORT",
        ),
        (run(engine="theirs", url="http://[::1"), "runs.x.url: 'http://[::1' is not the URL of a server; write http"),
        (
            run(engine="theirs", url="http://host:99999"),
            "runs.x.url: 'http://host:99999' is not the URL of a server; write",
        ),
        (
            run(engine="theirs", url="http://me:sk-1@host"),
            "runs.x.url: 'host' is not the URL of a server; write http://HOST:PORT, and give the token separately",
        ),
        (run(formats=["fp61"]), "runs.x.formats: unknown format 'fp61'; did you mean 'fp16'?"),
        (run(formats=["only-gpu"]), "runs.x.formats: no model has only-gpu; add it to formats"),
        (run(formats=[]), "runs.x.formats: [] should be non-empty"),
        (run(options={"dtyp": "x"}), "runs.x.options: transformers has no option 'dtyp'; did you mean 'dtype'?"),
        (run(options={"dtype": 16}), "runs.x.options.dtype: 16 is not of type 'string'"),
        (run(options=["dtype"]), "runs.x.options: ['dtype'] is not of type 'object'"),
        (run(environment={"A-B": "1"}), "runs.x.environment: a variable's name is letters, digits and '_'"),
        (run(environment={"A": True}), "runs.x.environment.A: True is not of type 'string', 'integer', 'number'"),
        (run(environment={"OMP_NUM_THREADS": 1}), "runs.x.environment: OMP_NUM_THREADS is set by Quantmill; remo"),
        (run(environment={"PYTHONPATH": "x"}), "runs.x.environment: PYTHONPATH is set by Quantmill; remove it"),
        (
            run(environment={"LD_PRELOAD": "libtcmalloc.so"}),
            "runs.x.environment: LD_PRELOAD is read at a program's start and works for servers only; remove it",
        ),
        (
            run(environment={"HF_TOKEN": "hf_x"}),
            "runs.x.environment: HF_TOKEN looks like a secret, and results show it; set it in your shell",
        ),
        (
            run(engine="theirs", url="http://host:1", environment={"A": 1}),
            "runs.x.environment: theirs is a server that you start; set A there",
        ),
        (run(gpus=2), "runs.x.gpus: transformers uses one GPU; leave gpus out"),
        (run(gpus=0), "runs.x.gpus: 0 is less than the minimum of 1"),
        (run(engine="many", gpus=2) | {"device": "cpu"}, "runs.x: many does not run on device cpu; leave it out"),
        (run(engine="old"), "runs.x: old: needs Python 2.7, and this is "),
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
        ({"variants": {"v": {"format": "fp16", "bits": 3}}}, "variants.v: fp16 has no parameter 'bits'; known: none"),
        ({"variants": {4: {"format": "gptq-int4"}}}, "variants: the name 4 is not text in YAML; put it in quotes"),
        (
            {"variants": {"tasks": {"format": "gptq-int4", "group_size": 32}}},
            "variants.tasks: Quantmill names other files so; choose another name",
        ),
        (
            {"variants": {"noise-floor": {"format": "gptq-int4", "group_size": 32}}},
            "variants.noise-floor: Quantmill names other files so; choose another name",
        ),
        ({"runs": {1: {"engine": "transformers", "formats": ["fp16"]}}}, "runs: the name 1 is not text in YAML; put"),
        (
            {"models": demo(**{"expected.json": PREBUILT})},
            "models.demo.prebuilt.expected.json: Quantmill names other files",
        ),
        ({"models": demo(imatrix=PREBUILT)}, "models.demo.prebuilt.imatrix: Quantmill names other files"),
        ({"models": demo(**{"latency-fp16": PREBUILT})}, "models.demo.prebuilt.latency-fp16: Quantmill names other f"),
        ({"models": {"a": {"source": "demo", "prebuilt": {7: PREBUILT}}}}, "models.a.prebuilt: the name 7 is not text"),
        ({"models": demo(fp16=PREBUILT)}, "models.demo.prebuilt.fp16: a format has this name; choose another"),
        ({"models": demo(x=PREBUILT | {"path": "no"})}, "models.demo.prebuilt.x: there is no folder no"),
        (
            {"models": demo(x=PREBUILT | {"engine": "gptqmodle"})},
            "models.demo.prebuilt.x: unknown engine 'gptqmodle'; did you mean 'gptqmodel'?",
        ),
        (
            {"models": demo(x=PREBUILT | {"engine": "many"})},
            "models.demo.prebuilt.x.engine: many does not load gptq; it loads hf",
        ),
        (
            {"models": demo(x=PREBUILT | {"engine": "slots"})},
            "models.demo.prebuilt.x.engine: slots is a server; name it under runs",
        ),
        (
            {"models": demo(x=PREBUILT | {"engine": "theirs"})},
            "models.demo.prebuilt.x.engine: theirs is a server; name it under runs",
        ),
        ({"models": demo(x=PREBUILT | {"engine": "old"})}, "models.demo.prebuilt.x: old: needs Python 2.7"),
        (
            {"models": demo(x={"layout": "ct2", "path": "bare"})},
            "models.demo.prebuilt.x: bare has no model.bin, so it is not a ct2 artifact",
        ),
        (
            {"models": demo(x={"layout": "mlc", "path": "bare"})},
            "models.demo.prebuilt.x.layout: unknown layout 'mlc'; known: awq, ",
        ),
        (
            {"models": demo(x={"layout": "gguf", "path": "bare"})},
            "models.demo.prebuilt.x: bare has no *.gguf, so it is not a gguf artifact",
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
    either = replace(here, device="cpu", engines=ENGINES | {"many": Engine("torch", ("hf",), multi_gpu=True)})
    with pytest.raises(ConfigError, match=r"runs.x.gpus: 2, and the device is cpu; leave gpus out"):
        complete(config, SCHEMA, either)
    (tmp_path / "bare/model.bin").touch()
    prebuilt = {"models": demo(x={"layout": "ct2", "path": "bare"}), "formats": ["fp16"]}
    for engine, line in (
        (Engine("torch", ("ct2",), devices=("cuda",)), "ctranslate2 does not run on device cpu; leave it out"),
        (Engine("old", ("ct2",), python="2.7"), "ctranslate2: needs Python 2.7"),
    ):
        lacking = replace(here, device="cpu", engines=ENGINES | {"ctranslate2": engine})
        with pytest.raises(ConfigError, match=rf"models.demo.prebuilt.x: {line}"):
            complete(prebuilt, SCHEMA, lacking)
    config = {"models": {"demo": {"source": "demo"}}, "formats": ["fp16", "only-gpu"]}
    with pytest.raises(ConfigError, match=r"formats: only-gpu does not run on device cpu; leave it out"):
        complete(config, SCHEMA, replace(here, device="cpu"))
    assert complete(config, SCHEMA, replace(here, device="auto"))["device"] == "auto"


def test_gpus_of_quantizers_are_those_that_jobs_may_use() -> None:
    config = {"models": {"demo": {"source": "demo"}}, "formats": ["fp16"], "quantizers": {"gpus": 2}}
    here = replace(REGISTRY, device="cuda", gpus=2)
    assert complete(config, SCHEMA, here)["quantizers"] == {"gpus": 2}
    with pytest.raises(ConfigError, match=r"quantizers.gpus: 2, and jobs may use 1; run with --resources gpu=2 hub=2"):
        complete(config, SCHEMA, replace(here, gpus=1))
    with pytest.raises(ConfigError, match=r"quantizers.gpus: 2, and the device is cpu; leave gpus out"):
        complete(config, SCHEMA, replace(here, device="cpu"))
    for given, error in (({"gpu_memory_gb": 0}, "quantizers.gpu_memory_gb"), ({"gpu": 2}, "unknown key 'gpu'")):
        with pytest.raises(ConfigError, match=error):
            complete(config | {"quantizers": given}, SCHEMA, here)
