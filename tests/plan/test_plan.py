"""Predictions of sizes, memory and time, compared with recorded runs and with transformers."""

import json
import subprocess
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from predictions import Pair, builds_memory, builds_seconds, runs_on_a_cpu, runs_on_a_gpu
from recorded_rows import KNOWN, ROWS, jobs_of, of_file, of_row

from quantmill.checkpoint import model_shape
from quantmill.loads.plan import PER_SLOT
from quantmill.metrics.goodput import goodput
from quantmill.plan.jobs import JOB, REQUESTS_A_SLOT, TRIES, Jobs, fill, reference_bytes
from quantmill.plan.resources import BuildResources, Machine, Memory, RunResources, Size, Time
from quantmill.plan.texts import count_tokens

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
# SmolLM2's rows of 576 do not fit the groups of several types, which tools and llama.cpp then choose otherwise
BUILT = [
    pytest.param(row, id=f"{row['model']}-{row['format']}-{row['device']}")
    for row in ROWS
    if row["study"]["of"] in ("demo", "h200", "h200-served")
]


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


def test_weights_give_the_size_without_a_config(tmp_path: Path) -> None:
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


def test_the_reference_is_at_most_what_is_predicted(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row["model"] == "demo")
    quality = row["protocol"]["quality"]
    took = quality["windows"] * (quality["window"] - 1) * 2048 * 2
    model = {"texts": {"evaluation": str(REPO / "config/evaluation.txt")}}
    positions = count_tokens(tmp_path, model, "evaluation", left=())
    assert took < reference_bytes(positions, of_file("demo/config.json"), "cpu", "auto") < 1.25 * took


def test_tokens_are_counted_where_they_are(tmp_path: Path) -> None:
    file = tmp_path / "tokens/evaluation.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"ids": [1] * 70, "documents": [{"ids": [2] * 5, "words": 1, "bytes": 9}]}))
    model = {"texts": {"evaluation": str(file)}}
    assert count_tokens(tmp_path, model, "evaluation", left=()) == 75
    assert count_tokens(tmp_path, model, "evaluation", left={str(file)}) == file.stat().st_size // 3


def test_wikitext_and_a_large_vocabulary_fit_a_disk() -> None:
    """Gemma 3 270M: logits of its 262,144 entries take 150 GB, and states of 640 with the head less than 2."""
    model = replace(of_file("demo/config.json"), vocab=262_144, hidden=640)
    logits, states = (reference_bytes(287_000, model, "cpu", keep) for keep in ("logits", "auto"))
    assert logits == 287_000 * 262_144 * 2
    assert 287_000 * 640 * 4 < states < 2e9


IN_MEMORY = "llama-7b fp16"  # mapped from a file system in memory, where a whole file counts: docs/FIGURES.md, 5,970 MB
SEVERAL_GPUS = "llama-7b fp16@vllm-tp2"  # two workers, and the ask is that of one
NO_KERNEL = "llama-1.1b bnb-int8@vllm"  # vLLM makes 12 tokens/s, and 400 to 600 of other formats


@pytest.fixture(scope="module")
def runs() -> list[Pair]:
    return list(runs_on_a_gpu())


def test_memory_is_enough_and_at_most_half_more(runs: list[Pair]) -> None:
    pairs = [*builds_memory(), *runs_on_a_cpu(), *(pair for pair in runs if pair.what == "MB to run")]
    special = [pair for pair in pairs if pair.name.endswith((IN_MEMORY, SEVERAL_GPUS)) and pair.what == "MB to run"]
    assert (len(pairs) > 200, len(special)) == (True, 3)
    assert all(0.44 < pair.predicted / pair.took < 1 for pair in special)
    assert [pair for pair in pairs if not pair.took <= pair.predicted < 1.5 * pair.took and pair not in special] == []


def test_a_time_is_within_a_factor_of_two(runs: list[Pair]) -> None:
    """Or within ten seconds: predictions count the start of a process, and some records do not."""
    pairs = [*builds_seconds(), *(pair for pair in runs if pair.what == "s to run")]
    assert len(pairs) > 150
    misfits = [pair for pair in pairs if not pair.took / 2 < pair.predicted < max(2 * pair.took, pair.took + 10)]
    assert [pair.name for pair in misfits] == [f"h200-served {NO_KERNEL}"]


def test_a_text_with_fewer_tokens_fills_fewer_samples() -> None:
    assert fill({"samples": 128, "sequence_length": 2048}, of_file("demo/config.json"), 9000) == 17 * 512


def test_times_follow_from_products_copies_and_files() -> None:
    model = of_file("demo/config.json")
    shape = replace(model, parameters=10**9, layers=10)
    machine = Machine(flops=1e12, bandwidth=1e10, file=1e9)
    build = BuildResources(Size(2), Memory(0), Memory(0), Time(3, ns=2, block=0.5, flop=1e3, forwards=4))
    run = RunResources(cpu=0, cuda=0, start=7, block=0.001)
    protocol = {"repeats": 3, "new_tokens": 200, "processes": 2, "decode": "generate"}
    study = {"device": "cuda", "latency": protocol | {"prompt_tokens": [], "batch_sizes": []}}
    study |= {"calibration": {"samples": 4, "sequence_length": 100}}
    jobs = Jobs(study, ("f", "e"), {"f": build}, {"e": run}, machine)
    # to start, a weight, a block, what is calculated of 400 tokens; 2 GB are read and 2 written
    assert jobs.build("f", "e", shape, gated=False).seconds == pytest.approx(JOB + 3 + 2 + 5 + 1 + 3.2 + 4)
    # starts, a file of 2 GB, and (3 x 3 + 1) x 200 tokens of 10 blocks, 2 GB read and 2 GFLOP
    token = 10 * 0.001 + 0.2 + 0.002
    assert jobs.latency("f", "e", shape, 3).seconds == pytest.approx(JOB + 2 * (7 + 2 + 2000 * token))
    captured = replace(jobs, study=study | {"latency": study["latency"] | {"decode": "captured"}})
    once_more = 2 * (7 + 2 + 2000 * (token - 0.01))
    assert captured.latency("f", "e", shape, 3).seconds == pytest.approx(JOB + 2 * (9 + 2000 * token) + once_more)


def test_loads_take_as_long_as_their_tokens() -> None:
    model = replace(of_file("demo/config.json"), parameters=10**9, layers=10)
    build = BuildResources(Size(2), Memory(0), Memory(0), Time(0))
    run = RunResources(cpu=0, cuda=0, start=90, block=0.001)
    nothing = {"burst": 0, "concurrency": [], "rates": [], "goodput": False, "new_tokens": 50, "requests": 20}
    protocol = {"repeats": 1, "new_tokens": 1, "processes": 1, "decode": "generate"}
    machine = Machine(flops=1e12, bandwidth=1e12, file=1e12)

    def step(users: int) -> float:
        return 0.01 + 0.002 + 0.002 * users

    for loads, seconds in (
        ({"burst": 20}, 50 * step(20)),
        ({"concurrency": [1, 10]}, PER_SLOT * 50 * (step(1) + step(10))),
        ({"rates": [4]}, 20 / 4 + 50 * step(1)),
        ({"goodput": True, "new_tokens": [20, 80]}, TRIES * 50 * step(20)),
    ):
        study = {"device": "cuda", "loads": nothing | loads | {"restarts": 3}, "calibration": {}}
        study |= {"latency": protocol | {"prompt_tokens": [], "batch_sizes": []}}
        found = Jobs(study, ("f", "e"), {"f": build}, {"e": run}, machine).load("f", "e", model)
        assert found.seconds == pytest.approx(JOB + 3 * (2 * 90.002 + seconds), rel=1e-3)
    assert REQUESTS_A_SLOT == PER_SLOT
    assert signature(goodput).parameters["tries"].default == TRIES
