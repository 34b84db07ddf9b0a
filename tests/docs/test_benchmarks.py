"""Benchmarks that read results: their figures, and their errors for other files."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

REPO = Path(__file__).resolve().parents[2]
TABLES = ("by_hand.py", "perplexities.py")


def benchmark(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, REPO / "benchmarks" / name, *arguments], capture_output=True, text=True)


def assert_one_line(result: subprocess.CompletedProcess[str], words: str) -> None:
    assert result.returncode == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert words in result.stderr


def test_a_passage_ends_before_its_word(tmp_path: Path) -> None:
    line = " ".join(["Elephants", *["are"] * 45, "Elephants", "again"])
    (tmp_path / "text").write_text(f"a title\n{line}\ntoo short\n{line.replace('Elephants', 'Owls')}\n")
    assert benchmark("last_words.py", tmp_path / "text", tmp_path / "a task").returncode == 0
    (found,) = map(json.loads, (tmp_path / "a task/last_words.jsonl").read_text().splitlines())
    assert found == {"passage": " ".join(["Elephants", *["are"] * 45]), "word": "Elephants"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no line has such a passage"),
        (b"short\n" * 9, "no line has such a passage"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (None, "No such file or directory"),
    ],
)
def test_a_text_without_passages_makes_no_task(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    assert_one_line(benchmark("last_words.py", tmp_path / "text", tmp_path / "task"), words)
    assert not (tmp_path / "task").exists()


@pytest.mark.parametrize("content", ["", '{"protocol"', "[]", "{}", '{"protocol": 1}'])
@pytest.mark.parametrize("name", TABLES)
def test_a_file_without_results_is_one_line(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "cell.json").write_text(content)
    arguments = [tmp_path / "cell.json"] * (3 if name == "perplexities.py" else 2)
    assert_one_line(benchmark(name, *arguments), "cell.json: is not ")


def test_another_protocol_and_another_engine_are_named(tmp_path: Path) -> None:
    quality = {"protocol": {"perplexity": "gptq-2048", "windows": 1}, "summary": {"perplexity": 2.0}}
    (tmp_path / "quality.json").write_text(json.dumps(quality))
    text, out = tmp_path / "text", tmp_path / "table.json"
    text.write_text("a")
    assert_one_line(benchmark("perplexities.py", text, out, tmp_path / "quality.json"), "on another text than")
    quality["protocol"]["text_sha256"] = hashlib.sha256(b"a").hexdigest()
    (tmp_path / "quality.json").write_text(json.dumps(quality))
    assert_one_line(benchmark("perplexities.py", text, out, tmp_path / "quality.json"), "the protocol gptq-2048")
    assert not out.exists()
    runs = [{"prompt": 0, "token_seconds": [0.1, 0.2]}]
    row = {"engine": "ctranslate2", "mode": "eager", "other_modes": [], "runs": runs}
    (tmp_path / "latency.json").write_text(json.dumps(row))
    assert_one_line(benchmark("by_hand.py", out, tmp_path / "latency.json"), "use ctranslate2")
    (tmp_path / "latency.json").write_text(json.dumps(row | {"engine": "vllm", "device": {"device": "cpu"}}))
    result = benchmark("by_hand.py", out, tmp_path / "latency.json", "--python", "vllm-cpu=nowhere/python")
    assert_one_line(
        result, "nowhere/python: is not a program; name a Python that has vllm with --python vllm-cpu=INTERPR"
    )
    assert not out.exists()


def test_row_and_library_are_measured_in_turn(tmp_path: Path) -> None:
    """A fake interpreter takes 10 ms a token for the row, and 10 to 12 for the library."""
    latency = tmp_path / "artifacts/m/latency/fp16@vllm.json"
    latency.parent.mkdir(parents=True)
    row = {"engine": "vllm", "mode": "vLLM", "other_modes": [], "options": {"dtype": "float16"}, "gpus": 1}
    row |= {"protocol": {"new_tokens": 3}, "device": {"device": "cpu", "threads": 2}}
    row |= {"runs": [{"prompt": 0, "token_seconds": [0.5, 0.51, 0.52]}]}
    latency.write_text(json.dumps(row))
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/bash
echo "$@" >> {tmp_path}/calls
case $2 in
latency.measure) cp {latency} "$4" ;;
*) echo a library speaks; echo by hand: 0.01$(($(wc -l < {tmp_path}/calls) / 2 - 1)) ;;
esac
"""
    )
    python.chmod(0o755)
    arguments = (tmp_path / "table.json", latency, "--python", f"vllm-cpu={python}", "--rounds", "3")
    result = benchmark("by_hand.py", *arguments)
    assert result.returncode == 0, result.stderr
    (found,) = json.loads((tmp_path / "table.json").read_text())
    assert list(found.values()) == ["m", "`fp16@vllm`", "vLLM", "100.0", "90.9", "1.100 (1.000 to 1.200)"]
    again, by_hand = (tmp_path / "calls").read_text().splitlines()[:2]
    assert again.split()[2] == str(tmp_path / "artifacts/m/fp16")
    assert '--options={"dtype": "float16"}' in again and "--threads=2" in again
    assert by_hand.split()[1:] == ["--alone", str(tmp_path / "artifacts/m/fp16"), str(latency)]


@pytest.mark.parametrize(
    ("device", "compute_type", "options", "dtype"),
    [
        ("cpu", "bfloat16", {}, "float32"),  # bitsandbytes' 4 bits: its layers alone multiply in bfloat16
        ("cpu", "int8", {}, "float32"),
        ("cpu", "float32", {"dtype": "bfloat16"}, "bfloat16"),
        ("cuda", "bfloat16", {}, "bfloat16"),
        ("cuda", "int8", {}, "float16"),
    ],
)
def test_by_hand_uses_the_type_of_the_row(device: str, compute_type: str, options: dict[str, str], dtype: str) -> None:
    row = {"device": {"device": device}, "compute_type": compute_type, "options": options}
    told = f"import by_hand; print(by_hand.dtype({row!r}))"
    result = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, cwd=REPO / "benchmarks")
    assert result.stdout == f"{dtype}\n", result.stderr


@pytest.mark.parametrize("quantization", [{}, {"quantization_config": {"quant_method": "awq"}}])
def test_same_process_refuses_another_format(tmp_path: Path, quantization: dict[str, dict[str, str]]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(quantization))
    result = benchmark("same_process.py", tmp_path / "out.json", tmp_path)
    assert_one_line(result, "name an artifact of gptq, bitsandbytes")
    assert not (tmp_path / "out.json").exists()


def test_ways_are_compared_round_by_round() -> None:
    """The machine slows down with each round, so medians over all rounds would miss a difference of a tenth."""
    told = """
import json, same_process
hand = [[round * each for each in (1.0, 1.0, 9.0)] for round in range(1, 7)]
row = [[1.1 * each for each in one] for one in hand]
print(json.dumps(same_process.compare({"by_hand": sum(hand, []), "row": sum(row, [])}, 6)))
"""
    result = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, cwd=REPO / "benchmarks")
    assert result.returncode == 0, result.stderr
    compared = json.loads(result.stdout)
    assert compared["by_hand"]["speed"] == 1
    assert [compared["row"]["speed"], *compared["row"]["speed_95"]] == pytest.approx([1 / 1.1] * 3)
    assert compared["by_hand"]["median"] == 5  # of 1 to 6, each twice, and 9 to 54


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rounds", "0"], "--rounds: write 1 or more"),
        (["--tokens", "1"], "--tokens: write 2 or more"),
        (["--vllm", "cpu", "--options", "[]"], "is not a mapping"),
        (["--vllm", "cpu", "--options", "{"], "is not JSON"),
        (["--options", '{"dtype": "bfloat16"}'], "--options: goes with --vllm"),
    ],
)
def test_same_process_refuses_options_that_cannot_be(tmp_path: Path, options: list[str], words: str) -> None:
    result = benchmark("same_process.py", tmp_path / "out.json", tmp_path, *options)
    assert result.returncode in (1, 2)
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_changed_predictions_in_nats_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPO / "benchmarks")
    import rounding_noise

    plain = np.log([[[0.6, 0.4], [0.75, 0.25]], [[0.5, 0.5], [0.9, 0.1]]])
    moved = np.log([[[0.4, 0.6], [0.75, 0.25]], [[0.5, 0.5], [0.9, 0.1]]])  # one place of four has another first
    found = rounding_noise.compare(plain, moved, np.array([[0, 1], [1, 0]]))  # each piece's second is predicted
    gap = np.log(0.6 / 0.4)
    assert found["largest"] == pytest.approx([gap, 0.0])
    assert found["largest_of_all"] == pytest.approx(gap)
    assert found["mean"] == pytest.approx(gap / 4)
    assert found["other_first_choice"] == 0.25
    assert found["moved_root_mean_square"] == pytest.approx(gap / 2)  # of one place in four
    assert found["text_moved"] == pytest.approx(gap / 2)  # of one piece in two


def test_a_text_that_is_too_short_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens/evaluation.json").write_text('{"ids": [1, 2, 3]}')
    result = benchmark("rounding_noise.py", tmp_path / "out.json", tmp_path / "fp16")
    assert_one_line(result, "evaluation.json: has 3 tokens, but 2048 are needed")
    assert not (tmp_path / "out.json").exists()


def test_time_per_token_excludes_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPO / "benchmarks")
    from step_profile import Kernel, summary

    whole = [Kernel("product", 90, 900.0), Kernel("norm", 40, 100.0), Kernel("prompt alone", 3, 50.0)]
    first = [Kernel("product", 10, 600.0), Kernel("prompt alone", 3, 50.0)]
    found = summary(whole, first, 5)
    assert (found["gpu_ms"], found["kernels"]) == (pytest.approx(0.1), 30)  # 400 us and 120 calls for four tokens
    assert found["largest"][:2] == [{"kernel": "product", "share": 0.75}, {"kernel": "norm", "share": 0.25}]
    assert summary([], [], 2) == {"gpu_ms": 0, "kernels": 0, "largest": []}


def test_a_profile_of_one_token_is_refused(tmp_path: Path) -> None:
    result = benchmark("step_profile.py", tmp_path / "out.json", tmp_path, "--tokens", "1")
    assert result.returncode == 2
    assert "--tokens: write 2 or more" in result.stderr


@pytest.mark.parametrize(
    ("content", "words"), [('{"engine": "llama_cpp", "source": {}}', "runs in llama_cpp; name"), ("{", "quantmill")]
)
def test_an_unknown_artifact_is_not_profiled(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "quantmill.json").write_text(content)
    assert_one_line(benchmark("step_profile.py", tmp_path / "out.json", tmp_path), words)
    assert_one_line(benchmark("step_profile.py", tmp_path / "out.json", tmp_path / "none"), "none")
    assert not (tmp_path / "out.json").exists()


def repeated(rate: float, low: float, high: float, *interference: str) -> dict[str, object]:
    summary = {"tokens_per_second": rate, "tokens_per_second_low": low, "tokens_per_second_high": high}
    return summary | {"tokens": 100 * rate, "seconds": 100.0, "interference": list(interference)}


def test_repeated_rows_are_compared_with_quiet_ones(tmp_path: Path) -> None:
    arms = {
        "quiet": [repeated(100, 90, 110), repeated(104, 102, 106)],
        "busy": [repeated(80, 70, 90, "not steady: x"), repeated(90, 80, 103)],
    }
    for name, rows in arms.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    out = tmp_path / "rows.json"
    assert benchmark("ten_rows.py", out, "--table", *(tmp_path / f"{name}.json" for name in arms)).returncode == 0
    found = json.loads(out.read_text())
    assert [(row["host"], row["the truth"], row["holds it"]) for row in found] == [
        ("quiet", "104", "yes"),  # of the other quiet row
        ("quiet", "100", "no"),
        ("busy", "102", "no"),  # of both
        ("busy", "102", "yes"),
    ]
    assert [row["the miss"] for row in found] == [
        "-",
        "faster by 2.0% beyond its end; nothing in the row says why",
        "slower by 13.3% beyond its end; marked",
        "-",
    ]
