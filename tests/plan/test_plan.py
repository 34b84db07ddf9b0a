"""What a study will take, against what recorded runs took and what transformers counts."""

import json
import subprocess
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from recorded_rows import ENGINES, KNOWN, ROWS, jobs_of, of_file, of_row

from quantmill.checkpoint import model_shape
from quantmill.loads.plan import PER_SLOT
from quantmill.metrics.goodput import goodput
from quantmill.plan.durations import REQUESTS_A_SLOT, SERVER_START, TRIES, Rates, interpolate
from quantmill.plan.jobs import fill, job_mb, logits_bytes
from quantmill.plan.resources import CUDA_BUILD

SMALL = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 500,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
ARCHITECTURES = [
    {"model_type": "llama"} | GROUPED | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    {"model_type": "mistral"} | GROUPED,
    {"model_type": "phi3", "pad_token_id": 0} | GROUPED,
    {"model_type": "qwen2"} | GROUPED,
    {"model_type": "qwen3"} | GROUPED,
    {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 24} | GROUPED,
    {"model_type": "mixtral", "num_local_experts": 4} | GROUPED,
    {"model_type": "gemma"} | GROUPED,
    {"model_type": "gemma2"} | GROUPED,
]
COUNT = """
import json, sys, torch, transformers
for config in json.load(sys.stdin):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    print(sum(parameter.numel() for parameter in model.parameters()))
"""
PARENT = 100  # MB of the process that starts the one that measures
LIBRARIES = {"bnb-nf4": "bitsandbytes", "torchao-int8": "torchao", "hqq-int4": "hqq", "exl3-random": "exllamav3"}
WITHOUT_TORCH = ("fp16", "mlc-q4f16_1")  # are built
NOISE = 250  # MB by which runs of the same job differ, most of a small model's
BUILT = [pytest.param(row, id=f"{row['model']}-{row['format']}-{row['device']}") for row in ROWS]


@pytest.mark.parametrize(("file", "parameters"), KNOWN.items())
def test_parameters_of_a_config(file: str, parameters: int) -> None:
    found = of_file(file)
    assert (found.parameters, found.exact) == (parameters, True)


def test_parameters_are_those_that_transformers_makes(torch_python: Path) -> None:
    result = subprocess.run(
        [torch_python, "-c", COUNT], input=json.dumps(ARCHITECTURES), capture_output=True, text=True, check=True
    )
    assert [model_shape.of(config).parameters for config in ARCHITECTURES] == [
        int(line) for line in result.stdout.split()
    ]
    assert {config["model_type"] for config in ARCHITECTURES} == set(model_shape.KINDS)


def test_experts_that_are_called_otherwise_count() -> None:
    deepseek_v3 = {  # its config.json, in part
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "num_hidden_layers": 61,
        "vocab_size": 129_280,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
    }
    found = model_shape.of(deepseek_v3)
    assert found.parameters == pytest.approx(671e9, rel=0.05)  # as its authors say
    assert not found.exact


def test_a_config_that_tells_nothing_is_known_by_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "hidden_size": 128}')
    (tmp_path / "model.safetensors").write_bytes(bytes(5000))
    found = model_shape.of_folder(tmp_path)
    assert (found.parameters, found.exact) == (2500, False)
    sizes = json.loads((REPO / "demo/config.json").read_text())
    for damaged in (
        "[" * 100_000,
        "[]",
        json.dumps(sizes | {"hidden_size": "256"}),
        json.dumps(sizes | {"head_dim": 1e9}),
    ):
        (tmp_path / "config.json").write_text(damaged)
        assert model_shape.of_folder(tmp_path) == found
    with pytest.raises(FileNotFoundError):
        model_shape.of_folder(tmp_path / "later")


@pytest.mark.parametrize("row", BUILT)
def test_an_artifact_is_as_large_as_predicted(row: dict[str, Any]) -> None:
    jobs = jobs_of("cuda")
    predicted = jobs.artifact_bytes(row["format"], of_row(row)) - jobs.formats[row["format"]].size.files
    # llama.cpp mixes types by the model's shape, and takes others where rows do not fit; its files hold the tokenizer
    near = 0.1 if row["format"].startswith("gguf-") else 0.01
    assert predicted == pytest.approx(row["artifact"]["weight_bytes"], rel=near)


def test_logits_are_at_most_what_is_predicted() -> None:
    row = next(row for row in ROWS if row["model"] == "demo")
    quality = row["protocol"]["quality"]
    took = quality["windows"] * (quality["window"] - 1) * 2048 * 2
    text = (REPO / "config/evaluation.txt").stat().st_size
    assert took < logits_bytes(text, 2048) < 1.25 * took


# results/h200 lay in a file system in memory, where weights that are read from a mapped file count as the process's own
MAPPED = {
    ("llama-7b", "fp16", "measured"),
    ("llama-7b", "ct2-int8", "built"),
    ("llama-7b", "gguf-f16", "measured"),
    ("llama-7b", "gguf-q8_0", "measured"),
}


@pytest.mark.parametrize("row", BUILT)
def test_a_build_takes_what_it_asks_for_and_not_much_less(row: dict[str, Any]) -> None:
    if (row["model"], row["format"], "built") in MAPPED:
        pytest.skip("its weights were mapped from a file system in memory")
    if row["format"].startswith("gguf-"):
        pytest.skip("recorded is the program that starts llama.cpp's, not these")
    took = row["artifact"]["peak_memory_bytes"] / 1e6
    if row["device_details"]["device"] == "cpu" and row["format"] not in WITHOUT_TORCH:
        took += CUDA_BUILD  # recorded with a CPU build
    made = {name: row["artifact"]["parameters"].get(name, 1) for name in ("samples", "sequence_length")}
    jobs = jobs_of(row["device_details"]["device"], calibration=made)
    asked = jobs.build(row["format"], row["engine"], of_row(row), gated=False).mb
    assert job_mb(took) <= asked < job_mb(max(1.25 * took, took + NOISE))


@pytest.mark.parametrize(
    "path",
    [
        *sorted(REPO.glob("results/h200/*/latency/*.json")),
        *(path for path in sorted(REPO.glob("results/h200-served/*/latency/*.json")) if path.stem in LIBRARIES),
    ],
    ids=lambda path: str(path.parts[-4:]),
)
def test_a_latency_job_takes_what_it_asks_for_and_not_much_less(path: Path) -> None:
    if (path.parts[-3], path.stem, "measured") in MAPPED:
        pytest.skip("its weights were mapped from a file system in memory")
    result = json.loads(path.read_text())
    # of the plain way: what capturing compiles is compiled by a process a core, whose shared pages these results
    # counted once for each
    plain = next((way for way in result["other_modes"] if way["mode"] in ("generate", "eager")), result)
    took = plain["memory_bytes"]["resident"] / 1e6
    model = {"demo": "demo/config.json", "llama-1.1b": "config/examples/llama-1.1b.json"}
    file = model.get(path.parts[-3], "config/examples/llama-2-7b.json")
    jobs, engine = jobs_of("cuda"), LIBRARIES.get(path.stem) or ENGINES[path.stem]
    asked = jobs.latency(path.stem.replace("-random", "-4.0bpw"), engine, of_file(file), prompts=9).mb
    assert job_mb(took) < asked
    if engine != "exllamav3":  # is given room for a file, of which it holds little
        assert asked < job_mb(max(1.25 * took, jobs.engines[engine].floor)) + PARENT


def test_a_text_with_fewer_tokens_fills_fewer_samples() -> None:
    found = fill({"samples": 128, "sequence_length": 2048}, of_file("demo/config.json"), 9000)
    assert found == {"samples": 17, "sequence_length": 512}


def test_between_what_was_measured() -> None:
    points = [(1.0, 10.0), (3.0, 20.0), (3.0, 40.0)]
    assert interpolate(points, 2) == 20  # half-way to the mean of 20 and 40
    assert interpolate(points, 0.1) == 10
    assert interpolate(points, 6) == 60
    assert interpolate(points, 6.1) is None
    assert interpolate([], 1) is None


def test_times_are_of_the_same_format_engine_device_and_number_of_samples() -> None:
    row = {"format": "gptq-int4", "engine": "gptqmodel", "device_details": {"device": "cuda"}}
    row["tokens_per_second"] = 100.0
    row["artifact"] = {
        "parameter_count": 10,
        "build_s": 85.0,
        "parameters": {"samples": 4, "sequence_length": 100},
    }
    rates = Rates([row, row | {"engine": "other", "tokens_per_second": 1.0}], "cuda", ("gptq-int4",), "gptqmodel", 10)
    assert rates.build(400) == 100
    assert rates.build(801) is None  # more than twice the tokens
    # two processes, each 15 s to start and (3 x 3 + 1) x 200 tokens at 100 a second
    assert rates.latency({"repeats": 3, "new_tokens": 200, "processes": 2, "decode": "generate"}, 3) == 2 * (15 + 20)
    assert Rates([row], "cpu", ("gptq-int4",), None, 10).build(400) is None


def test_a_servers_loads_take_as_long_as_their_tokens_at_the_batch_measured() -> None:
    row = {"format": "fp16", "engine": "vllm-serve", "device_details": {"device": "cuda"}, "tokens_per_second": 100.0}
    row |= {"artifact": {"parameter_count": 10}, "batches": [{"batch": 10, "tokens_per_second": 500.0}]}
    rates = Rates([row], "cuda", ("fp16",), "vllm-serve", 10)
    nothing = {"burst": 0, "concurrency": [], "rates": [], "goodput": False, "new_tokens": 50, "requests": 20}
    for loads, seconds in (
        ({"burst": 20}, 50 * 20 / 500),  # twice the batch measured, twice the time of a step
        ({"concurrency": [1, 10]}, REQUESTS_A_SLOT * 50 * (1 / 100 + 10 / 500)),
        ({"rates": [4]}, 20 / 4 + 50 / 100),
        ({"goodput": True, "new_tokens": [20, 80]}, TRIES * 50 * 20 / 500),
    ):
        assert rates.loads(nothing | loads | {"restarts": 3}) == pytest.approx(3 * (SERVER_START + seconds))
    assert Rates([row], "cpu", ("fp16",), "vllm-serve", 10).loads(nothing | {"restarts": 1}) is None
    assert REQUESTS_A_SLOT == PER_SLOT
    assert signature(goodput).parameters["tries"].default == TRIES
