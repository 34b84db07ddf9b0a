"""Disturbance, deployed speeds, the device's bandwidth, loops in texts, and warnings of a row."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from whole_results import cell, edit, window_losses

from quantmill.report import axes, caveats, pareto, repetition, results

CONFIG = {"reference": "reference", "models": {"m": {}}}


def collect(*cells: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["format"]: row for row in results.collect({"config": CONFIG, "cells": list(cells)})["rows"]}


def disturb(made: dict[str, Any]) -> dict[str, Any]:
    edit(made["latency"], lambda content: content.update(interference=["a busy host (process 0)"]))
    return made


def outputs(made: dict[str, Any], *texts: list[int]) -> dict[str, Any]:
    prompts = [{"text": "p", "tokens": 1, "output_ids": ids} for ids in texts]
    edit(made["latency"], lambda content: content.update(prompts=prompts))
    return made


def manifest(made: dict[str, Any], **more: Any) -> dict[str, Any]:
    edit(f"{made['artifact']}/quantmill.json", lambda content: content.update(more))
    return made


def test_a_disturbed_speed_is_a_lower_bound(tmp_path: Path) -> None:
    cells = {"reference": (10, 0), "slow": (5, 0), "loud-fast": (90, 0), "loud-slow": (1, 5), "better": (1, -5)}
    made = {name: cell(tmp_path, name, rate, window_losses(extra)) for name, (rate, extra) in cells.items()}
    rows = collect(*(disturb(each) if name.startswith("loud") else each for name, each in made.items()))
    assert {name: (row["pareto"], row["dominated_by"]) for name, row in rows.items()} == {
        "reference": (False, ["loud-fast"]),  # which is at least 81 tokens/s
        "slow": (False, ["reference", "loud-fast"]),
        "loud-fast": (True, []),
        "loud-slow": (None, None),  # in truth it may be the fastest
        "better": (True, []),
    }
    assert rows["loud-slow"]["missing"]["pareto"] == (
        "its speed was disturbed, so it is a lower bound, and leaves open whether it is on the front: as measured, "
        "reference, slow, loud-fast, better would dominate it; measure it again"
    )


def test_all_disturbed_speeds_have_no_front(tmp_path: Path) -> None:
    rows = collect(*(disturb(cell(tmp_path, str(rate), rate, window_losses(0))) for rate in (10, 90)))
    assert [row["missing"]["pareto"] for row in rows.values()] == [pareto.ALL_DISTURBED] * 2


def way(made: dict[str, Any], mode: str, engine: str = "fake", **others: Any) -> dict[str, Any]:
    edit(made["latency"], lambda content: content.update(mode=mode, engine=engine, **others))
    return made | {"engine": engine}


def test_a_front_rests_on_deployed_speeds(tmp_path: Path) -> None:
    base = cell(tmp_path, "reference", 10, window_losses(0))
    generated = json.loads(Path(base["latency"]).read_text())["summary"]
    others = [{"mode": "generate", "refused": None, "summary": generated}]
    cells = [
        base,
        way(cell(tmp_path, "captured", 90, window_losses(0)), "captured"),
        way(cell(tmp_path, "both", 90, window_losses(0)), "captured", other_modes=others),
        way(cell(tmp_path, "own", 900, window_losses(0)), "compiled", "quantmill-tvm"),
    ]
    rows = collect(*cells)
    assert {name: row["deployed_tokens_per_second"] for name, row in rows.items()} == {
        "reference": 10,
        "captured": None,
        "both": 10,
        "own": None,
    }
    assert rows["captured"]["missing"]["pareto"] == ("decoded by Quantmill's CUDA graph; set latency.decode: generate")
    assert rows["own"]["missing"]["deployed_tokens_per_second"] == "MLC-LLM was not run; docs/MLC.md says how"
    assert {name: row["pareto"] for name, row in rows.items()} == {
        "reference": True,
        "captured": None,
        "both": True,
        "own": None,
    }
    asked = results.collect({"config": CONFIG | {"rank_own_speeds": True}, "cells": cells, "options": ""})["rows"]
    assert [row["deployed_tokens_per_second"] for row in asked] == [10, 90, 90, 900]
    assert [row["pareto"] for row in asked] == [False, False, False, True]


def with_bandwidth(made: dict[str, Any], bandwidth: float, rate: float) -> dict[str, Any]:
    """`made` as latency.measure writes it: an artifact of 100 bytes a token on a device that copied at `bandwidth`."""

    def change(content: dict[str, Any]) -> None:
        content["copy_bandwidth_bytes_per_second"] = bandwidth
        content["summary"] |= {"tokens_per_second": rate, "bandwidth_fraction": 100 * rate / bandwidth}
        content["other_modes"] = [{"mode": "other", "refused": None, "summary": dict(content["summary"])}]

    edit(made["latency"], change)
    return made


def test_rows_share_the_best_undisturbed_bandwidth(tmp_path: Path) -> None:
    made = [with_bandwidth(cell(tmp_path, f"f{i}", 10, None), *each) for i, each in enumerate([(400, 2), (1000, 3)])]
    loud = disturb(with_bandwidth(cell(tmp_path, "loud", 10, None), 5000, 4))
    elsewhere = with_bandwidth(cell(tmp_path, "elsewhere", 10, None), 7000, 7)
    edit(elsewhere["latency"], lambda content: content["device"].update(name="e"))
    rows = collect(*made, loud, elsewhere)
    for name, share in {"f0": 0.2, "f1": 0.3, "loud": 0.4, "elsewhere": 0.1}.items():
        row = rows[name]
        assert row["bandwidth_fraction"] == pytest.approx(share)
        assert row["latency_summary"]["bandwidth_fraction"] == pytest.approx(share)
        assert row["other_modes"][0]["bandwidth_fraction"] == pytest.approx(share)
        assert row["device_bandwidth"]["disturbed"] is False
    assert {rows[name]["device_bandwidth"]["bytes_per_second"] for name in ("f0", "f1", "loud")} == {1000}
    assert rows["f0"]["copy_bandwidth_bytes_per_second"] == 400  # what its own job saw stays
    drawn = {row["format"]: row["roofline"] for row in plot_rows(rows)}
    assert drawn["f0"] == pytest.approx(drawn["f1"]) == pytest.approx(10)  # as many bytes, one roofline


def plot_rows(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return axes.points(list(rows.values()))


def test_bandwidth_of_disturbed_rows_is_marked(tmp_path: Path) -> None:
    sizes = {"one": 400, "other": 500}
    rows = collect(*(disturb(with_bandwidth(cell(tmp_path, name, 10, None), b, 1)) for name, b in sizes.items()))
    assert all(row["device_bandwidth"] == {"bytes_per_second": 500, "disturbed": True} for row in rows.values())
    assert rows["one"]["bandwidth_fraction"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([*range(100, 127), *[7, 8] * 30], (28, 2)),
        ([*range(100, 127), *[7, 8] * 30, 7], (28, 2)),  # cut off within a repeat
        ([1] * 200, (1, 1)),
        ([*range(150), *[5] * 32], (151, 1)),
        ([*range(150), *[500] * 31], None),  # too short: a rule of a table, say
        ([*range(100), *[*range(200, 216)] * 4], (101, 16)),
        ([*range(100), *[*range(200, 216)] * 3], None),  # a paragraph three times
        ([*range(100), *[*range(200, 217)] * 6], None),  # a longer cycle is no short one
        ([*[7, 8] * 50, *range(100)], None),  # which it got out of
        ([*[7, 8] * 50, 9], None),
        (list(range(200)), None),
        ([1, 2, 3, 4], None),
        ([], None),
    ],
)
def test_a_cycle_until_the_end_is_a_loop(ids: list[int], found: tuple[int, int] | None) -> None:
    assert repetition.find(ids) == found


@pytest.mark.parametrize(
    ("kind", "said", "advice"),
    [
        ("int8", "saturate, for want of VNNI", "elsewhere the same artifact loses less"),
        ("int4", "round what they multiply to 8 bits", "elsewhere the same artifact loses less"),
        ("float16", "are not among this processor's own", "dtype: bfloat16 may be several times as fast"),
    ],
)
def test_what_a_processor_does_with_products_is_a_warning(tmp_path: Path, kind: str, said: str, advice: str) -> None:
    made = cell(tmp_path, "reference", 10, window_losses(0))
    edit(made["latency"], lambda content: content.update(versions={f"{kind} products": said}))
    assert collect(made)["reference"]["warnings"] == [f"its {kind} products {said}: {advice}"]


def test_a_server_without_tokens_has_no_loops() -> None:
    assert repetition.of_result({"prompts": [{"output_ids": [], "output_text": "a a a"}] * 2}) is None


def test_loops_of_the_recorded_demo_are_real() -> None:
    recorded = json.loads((REPO / "results/h200/demo/latency/ct2-int8.json").read_text())
    found = repetition.of_result(recorded)
    assert (found["prompts"], found["of"], found["first_token"]) == (3, 9, 37)
    named = [(loop["prompt"], loop["token"], loop["period"]) for loop in found["loops"]]
    assert named == [(2, 76, 6), (6, 37, 9), (9, 94, 8)]
    for prompt, token, period in named:
        ids = recorded["prompts"][prompt - 1]["output_ids"]
        begin = token - 1
        assert ids[begin:] == (ids[begin : begin + period] * len(ids))[: len(ids) - begin]
        assert ids[begin - 1] != ids[begin - 1 + period]


STAYS = [*range(100, 150), *[1, 2] * 30]  # a loop from token 51 on
LEAVES = list(range(110))


def looping(folder: Path, name: str, loops: int) -> dict[str, Any]:
    """Make a row of nine prompts that loops after the first `loops` of them."""
    return outputs(cell(folder, name, 10, window_losses(0)), *[STAYS] * loops, *[LEAVES] * (9 - loops))


def test_a_row_that_loops_significantly_more_is_marked(tmp_path: Path) -> None:
    loops = {"reference": 1, "habit": 1, "chance": 4, "own": 5, "none": 0}
    rows = collect(*(looping(tmp_path, name, count) for name, count in loops.items()))
    found = rows["own"]["degenerate"]
    assert (found["prompts"], found["of"], found["first_token"]) == (5, 9, 51)
    assert found["loops"][:2] == [
        {"prompt": 1, "token": 51, "period": 2, "reference_too": True},
        {"prompt": 2, "token": 51, "period": 2, "reference_too": False},
    ]
    # McNemar's test rejects at 4 against 0, not at 3 against 0: (b - c)^2 > 1.96^2 (b + c)
    assert found["reference"]["prompts"] == 1 and found["reference"]["difference_low"] > 0
    assert rows["chance"]["degenerate"]["reference"]["difference_low"] < 0
    assert rows["none"]["degenerate"]["loops"] == []
    assert {name: row["warnings"] for name, row in rows.items() if row["warnings"]} == {
        "own": [
            "falls into a loop after 5 of 9 prompts, reference after 1 (95% interval of the difference +1% to +73%)"
        ]
    }
    assert caveats.habits(list(rows.values()), "reference") == [
        "A habit of m: decoded greedily, reference falls into a loop after 1 of 9 prompts. A format is marked only if "
        "it does so significantly more often."
    ]


def test_a_model_in_low_bits_is_said_once(tmp_path: Path) -> None:
    """A prebuilt artifact has another source, and rows without one say nothing."""
    decoded = {"layout": "fp8", "weights": "float8 in blocks of 128 x 128", "dtype": "bfloat16", "tensors": 9}
    made = {name: cell(tmp_path, name, 10, None) for name in ("reference", "other", "plain")}
    for name in ("reference", "other"):
        manifest(made[name], source={"decoded": decoded})
    rows = list(collect(*made.values()).values())
    assert caveats.low_bits(rows) == [
        "m was published in float8 in blocks of 128 x 128 (fp8). The reference is that model, decoded to bfloat16. "
        "Formats with a similar grid lose less of it than of weights that were never rounded."
    ]
    assert caveats.low_bits([row | {"prebuilt": True} for row in rows]) == []


def test_loops_without_reference_texts_are_a_warning(tmp_path: Path) -> None:
    row = collect(outputs(cell(tmp_path, "alone", 10, None), STAYS))["alone"]
    assert row["degenerate"]["loops"][0]["reference_too"] is None
    assert row["warnings"] == ["falls into a loop after 1 of 1 prompts; there is no reference to compare with"]


def test_a_large_loss_is_a_warning(tmp_path: Path) -> None:
    rows = collect(
        cell(tmp_path, "reference", 10, window_losses(0)),
        cell(tmp_path, "below", 10, window_losses(20.2)),  # exp(20.2 / 50) = 1.498 by words
        cell(tmp_path, "above", 10, window_losses(20.4)),  # 1.504
    )
    assert {name: row["warnings"] for name, row in rows.items()} == {
        "reference": [],
        "below": [],
        "above": ["a large loss: its perplexity is 1.5 times reference's"],
    }


def test_an_unchecked_artifact_is_a_warning(tmp_path: Path) -> None:
    gates = {
        "none": None,
        "old": {"perplexity": 42.9, "reference": 42.8, "factor": 1.5, "windows": 8},
        "checked": {"faithful": {"divergence": 1e-6, "tolerance": 1e-3, "against": "its own weights"}},
        "unchecked": {"faithful": {"unchecked": "no engine reads them"}},
    }
    rows = collect(*(manifest(cell(tmp_path, name, 10, None), gate=gate) for name, gate in gates.items()))
    assert {name: row["warnings"] for name, row in rows.items() if row["warnings"]} == {
        "unchecked": ["not checked against its own weights: no engine reads them"]
    }
    assert rows["checked"]["artifact"]["gate"] == gates["checked"]


def test_experts_that_no_text_reached_are_a_warning(tmp_path: Path) -> None:
    found = {
        "dense": None,
        "all": {"count": 8, "unreached": []},
        "some": {"count": 1024, "unreached": [f"model.layers.3.mlp.experts.{number}" for number in (7, 9)]},
        "none, but all were shown": {"count": 8, "unreached": ["layer.1"], "all_tokens": True},
        "unknown, but all were shown": {"unknown": "memory short", "all_tokens": True},
        "unknown": {"unknown": "memory short"},
    }
    made = {name: cell(tmp_path, name, 10, None) for name in found}
    rows = collect(
        *(manifest(each, **({"experts": found[name]} if found[name] else {})) for name, each in made.items())
    )
    assert {name: row["warnings"] for name, row in rows.items() if row["warnings"]} == {
        "some": ["its calibration text never reached 2 of 1024 experts, the first model.layers.3.mlp.experts.7"],
        "unknown": ["whether its calibration text reached every expert is unknown: memory short"],
    }


def test_an_unchecked_artifact_has_no_place_on_the_front(tmp_path: Path) -> None:
    losses = window_losses(0)
    fast = manifest(cell(tmp_path, "fast", 99, losses), gate={"faithful": {"unchecked": "no engine reads them"}})
    rows = collect(cell(tmp_path, "reference", 10, losses), fast)
    assert {name: (row["pareto"], row["dominated_by"]) for name, row in rows.items()} == {
        "reference": (True, []),
        "fast": (None, None),
    }
    assert rows["fast"]["missing"]["pareto"].endswith("so it is not compared: no engine reads them")


def test_group_size_is_the_tools_or_explained(tmp_path: Path) -> None:
    parameters = {
        "gptq": {"group_size": 64},
        "awq": {"q_group_size": 128},
        "other": {"quantization": "int8"},
        "old": {},
    }
    rows = collect(*(manifest(cell(tmp_path, name, 10, None), parameters=each) for name, each in parameters.items()))
    sizes = {name: row["group_size"] for name, row in rows.items()}
    assert sizes == {"gptq": 64, "awq": 128, "other": None, "old": None}
    assert {name for name, row in rows.items() if "group_size" in row["missing"]} == {"other", "old"}
    results.write_csv(tmp_path / "r.csv", list(rows.values()))
    with (tmp_path / "r.csv").open() as file:
        assert [line["group_size"] for line in csv.DictReader(file)] == ["64", "128", "", ""]


@pytest.mark.parametrize("text", ["evaluation", "prompts", "calibration"])
def test_different_tokenizers_are_a_warning_of_every_row(tmp_path: Path, text: str) -> None:
    made = [cell(tmp_path, name, 10, window_losses(0)) for name in ("reference", "other")]
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    for name in ("evaluation", "prompts", "calibration"):
        said = {"tokenizer_differs": "transformers reads a text as 6 tokens where tokenizer.json makes 5"}
        (tokens / f"{name}.json").write_text(json.dumps(said if name == text else {}))
    rows = collect(*(each | {"evaluation": str(tokens / "evaluation.json")} for each in made))
    for row in rows.values():
        assert "transformers reads a text as 6 tokens where tokenizer.json makes 5" in row["warnings"]
    assert not any("tokens where" in said for row in collect(*made).values() for said in row["warnings"])


def test_a_server_without_prompt_ids_has_a_warning(tmp_path: Path) -> None:
    made = cell(tmp_path, "reference", 10, window_losses(0))
    edit(made["latency"], lambda content: content["versions"].update({"prompts' ids": "not told"}))
    said = "its server does not report the number of a prompt's tokens"
    assert said in collect(made)["reference"]["warnings"]


def test_an_unknown_disturbance_of_a_server_is_said_once(tmp_path: Path) -> None:
    words = "the server runs on another host, so interference from other programs is unknown"
    made = cell(tmp_path, "reference", 10, window_losses(0))
    edit(made["latency"], lambda content: content.update(versions={"disturbance": words}))
    row = collect(made)["reference"]
    assert row["warnings"] == [words]
    assert row["interference"] == [] and row["pareto"] is True
    assert caveats.products_warnings({"disturbance": words}) == []  # what the notes of each of its loads begin with
