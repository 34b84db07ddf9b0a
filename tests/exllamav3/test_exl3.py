"""EXL3: our reading against what ExLlamaV3's kernels made of the same bits, and how the kernels are compiled.

The kernels run on NVIDIA GPUs alone, so the engine, the converter and the quality gate are tested there by hand
(docs/METHODS.md). tests/exllamav3/exl3_golden.py made the arrays, on an H200 with exllamav3 1.6.5.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from string import Template

import numpy as np
import pytest
from conftest import REPO, line_of_refusal
from recorded_rows import list_jobs, of_file
from weight_files import save_file, source

from quantmill import layouts
from quantmill.checkpoint import EMBEDDINGS, HEAD, shards
from quantmill.checkpoint.shards import Checkpoint
from quantmill.exllamav3 import decodes_in_int8
from quantmill.layouts import Layer, Unread, exl3
from quantmill.layouts.write_model import write_model
from quantmill.plan.resources import costs_of

LAYER = "model.layers.0.mlp.up_proj"
GOLDEN = np.load(REPO / "tests/data/exl3.npz")
CASES = sorted({name.rpartition(".")[0] for name in GOLDEN.files})


def parts(case: str) -> dict[str, np.ndarray]:
    """Return a layer's tensors as they are stored."""
    found = {name: GOLDEN[f"{case}.{name}"] for name in ("trellis", "suh", "svh")}
    kind = case.partition("-")[0]
    return found | ({kind: np.array([1], np.int32)} if kind != "3inst" else {})


def artifact(folder: Path, layer: str, tensors: dict[str, np.ndarray], **rest: np.ndarray) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "exl3"}}))
    save_file({f"{layer}.{name}": value for name, value in tensors.items()} | rest, folder / "model.safetensors")
    return folder


def plain(folder: Path, outputs: int = 128, inputs: int = 128) -> Checkpoint:
    return source(folder, {f"{LAYER}.weight": np.zeros((outputs, inputs), np.float16)})


def test_the_cases_are_all_codebooks_and_half_bits() -> None:
    assert CASES == ["3inst-5", "mcg-3", "mul1-1", "mul1-2.5", "mul1-4"]


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_kernels(case: str, tmp_path: Path) -> None:
    model = plain(tmp_path / "source")
    read = exl3.read(artifact(tmp_path / "exl3", LAYER, parts(case)), model)
    found, expected = read(model.tensors()[f"{LAYER}.weight"]), GOLDEN[f"{case}.weight"].T.astype(np.float32)
    # theirs are rounded to float16 after each of four steps
    assert np.abs(found - expected).max() < 4e-3 * np.abs(expected).max()
    assert np.linalg.norm(found - expected) < 1e-3 * np.linalg.norm(expected)


def test_sizes_that_are_no_blocks_are_cut(tmp_path: Path) -> None:
    model = plain(tmp_path / "source", 100, 70)
    read = exl3.read(artifact(tmp_path / "exl3", LAYER, parts("mul1-4")), model)
    found = read(model.tensors()[f"{LAYER}.weight"])
    assert found.shape == (100, 70)
    whole = GOLDEN["mul1-4.weight"].T.astype(np.float32)
    assert np.abs(found - whole[:100, :70]).max() < 4e-3 * np.abs(whole).max()


def test_a_tied_model_runs_with_its_stored_head(tmp_path: Path) -> None:
    table = np.full((128, 128), 0.5, np.float16)
    tied = source(tmp_path / "source", {EMBEDDINGS: table})
    folder = artifact(tmp_path / "exl3", "lm_head", parts("mul1-4"), **{EMBEDDINGS: table})
    assert layouts.own_head("exl3", folder)
    write_model(tmp_path / "run", tied, exl3.read(folder, tied), "F32", own_head=True)
    run = shards.find(tmp_path / "run")
    assert run.config()["tie_word_embeddings"] is False
    assert (layouts.array(run.tensors()[EMBEDDINGS]) == 0.5).all()
    head = layouts.array(run.tensors()[HEAD])
    expected = GOLDEN["mul1-4.weight"].T.astype(np.float32)
    assert np.linalg.norm(head - expected) < 1e-3 * np.linalg.norm(expected)
    assert shards.bytes_per_token(folder) == sum(value.nbytes for value in parts("mul1-4").values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trellis": np.zeros((8, 7, 64), np.int16)}, r"trellis is \[8, 7, 64\], and the layer has \[8, 8\] tiles"),
        ({"trellis": np.zeros((8, 8, 64), np.int32)}, r"trellis is \[8, 8, 64\]"),
        ({"trellis": np.zeros((8, 8, 60), np.int16)}, r"3\.75 bits a weight"),
    ],
)
def test_a_trellis_of_another_matrix_is_refused(changes: dict, message: str, tmp_path: Path) -> None:
    stored = shards.find(artifact(tmp_path / "exl3", LAYER, parts("mul1-4") | changes)).tensors()
    with pytest.raises(Unread, match=message):
        exl3.check(Layer(plain(tmp_path / "source").tensors()[f"{LAYER}.weight"], stored))


def test_half_bits_are_of_one_codebook(tmp_path: Path) -> None:
    tensors = {name: value for name, value in parts("mul1-2.5").items() if name != "mul1"}
    stored = shards.find(artifact(tmp_path / "exl3", LAYER, tensors)).tensors()
    with pytest.raises(Unread, match="half bits need the codebook mul1"):
        exl3.check(Layer(plain(tmp_path / "source").tensors()[f"{LAYER}.weight"], stored))


@pytest.mark.parametrize("rate", ["4.0bpw", "2.5bpw"])
def test_a_file_is_as_large_as_predicted(rate: str) -> None:
    """Of the demo, which ExLlamaV3 quantized on an H200. One that ties its head has it all the same."""
    measured = json.loads((REPO / f"results/h200/exl3/manifest-{rate}.json").read_text())["weight_bytes"]
    size = costs_of(list_jobs()["formats"][f"exl3-{rate}"]).size
    shape = of_file("demo/config.json")
    assert size.bytes(shape) == pytest.approx(measured, rel=0.01)
    table = shape.vocab * shape.hidden
    tied = replace(shape, embeddings=table, parameters=shape.parameters - table)
    assert size.bytes(tied) == size.bytes(shape)


def test_what_a_card_says_of_loading_it_is_python(call: Callable, tools_python: Path) -> None:
    code = "from quantmill.publish import usage; print(usage.PYTHON['exllamav3'])"
    said = call(tools_python, "-c", code, PYTHONPATH=str(REPO / "scripts")).stdout
    lines = Template(said).substitute(repository="acme/demo")
    compile(lines, "snippet", "exec")
    assert 'snapshot_download("acme/demo")' in lines


# the library as far as its compilation goes: it writes where torch's builds are put, or fails
EXT = """
import os, pathlib
folder = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "exllamav3_ext"
assert not (folder / "lock").exists(), "it would wait for ever"
folder.mkdir(exist_ok=True)
with pathlib.Path({calls!r}).open("a") as file:
    file.write(os.environ["TORCH_CUDA_ARCH_LIST"] + "\\n")
if pathlib.Path({broken!r}).exists():
    (folder / "lock").touch()
    raise SystemExit("nvcc fatal")
(folder / "exllamav3_ext.so").write_text("kernels")
"""
RUN = """
import sys
from quantmill.exllamav3 import compile
from quantmill.common.program import run
if {gpu}:
    compile.architectures = lambda: "9.0"
run(compile.main)
"""


@pytest.fixture
def compile_it(tmp_path: Path, torch_python: Path, call: Callable) -> Callable:
    package = tmp_path / "site/exllamav3"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "ext.py").write_text(EXT.format(calls=str(tmp_path / "calls"), broken=str(tmp_path / "broken")))
    facts = tmp_path / "site/exllamav3-1.6.5.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: exllamav3\nVersion: 1.6.5\n")
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)

    def run(gpu: bool = True) -> str | None:
        """Return the line of a refusal; None where it went well."""
        paths = f"{tmp_path / 'site'}:{REPO / 'scripts'}"
        words = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": paths, "CUDA_HOME": str(tmp_path / "cuda")}
        result = call(torch_python, "-c", RUN.format(gpu=gpu), tmp_path / "out", **words)
        return line_of_refusal(result, tmp_path / "out")

    return run


def test_kernels_are_compiled_once_and_resume(compile_it: Callable, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    line = compile_it()
    assert line.startswith("error: exl3: the kernels of exllamav3 1.6.5 did not compile (exit code 1); the compiler's")
    (tmp_path / "broken").unlink()
    assert compile_it() is None  # also with the lock that a killed build leaves
    assert compile_it() is None  # from the cache
    (kernels,) = tmp_path.glob("cache/quantmill/exllamav3-*/exllamav3_ext/*.so")
    kernels.unlink()
    assert compile_it() is None  # after a part of it was removed
    assert (tmp_path / "calls").read_text() == "9.0\n9.0\n9.0\n"
    assert (tmp_path / "out/exllamav3_ext.so").read_text() == "kernels"
    assert json.loads((tmp_path / "out/quantmill.json").read_text())["nvcc"] == "13.0"


def test_a_machine_without_a_gpu_is_one_line(compile_it: Callable) -> None:
    line = compile_it(gpu=False)
    if line is None:
        pytest.skip("this machine has a GPU")
    assert line.startswith("error: exl3: torch ")
    assert line.endswith("sees no GPU here to compile the kernels for")


TORCH = """
class cuda:
    device_count = staticmethod(lambda: 1)
    get_device_capability = staticmethod(lambda number: (8, 0))
"""


@pytest.fixture
def load(call: Callable, tmp_path: Path) -> Callable[[], str]:
    """Return the error of loading the library on a GPU of compute capability 8.0, which a fake torch reports."""
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "exllamav3.py").touch()

    def run() -> str:
        code = "from quantmill.exllamav3 import library\nfrom quantmill.common.program import run\nrun(library)"
        paths = f"{tmp_path}:{REPO / 'scripts'}"
        return call(sys.executable, "-c", code, QUANTMILL_EXLLAMAV3=str(tmp_path / "built"), PYTHONPATH=paths).stderr

    return run


@pytest.mark.parametrize(
    ("files", "compiled", "said"),
    [
        ([], "8.0", "has no kernels of ExLlamaV3; compile them: python scripts/quantmill exllamav3.compile "),
        (["exllamav3_ext.so"], "9.0", "its kernels are for compute capability 9.0, this GPU has 8.0; compile them: "),
        (["exllamav3_ext.so"], "8.0;9.0", ""),
    ],
)
def test_missing_and_other_gpus_kernels_are_named(
    load: Callable[[], str], tmp_path: Path, files: list[str], compiled: str, said: str
) -> None:
    (tmp_path / "built").mkdir()
    (tmp_path / "built/quantmill.json").write_text(json.dumps({"architectures": compiled}))
    for name in files:
        (tmp_path / "built" / name).touch()
    line = load()
    assert line.startswith(f"error: {tmp_path / 'built'}: {said}") if said else line == ""


def test_a_link_to_an_emptied_cache_is_refused(load: Callable[[], str], tmp_path: Path) -> None:
    (tmp_path / "built").mkdir()
    (tmp_path / "built/quantmill.json").write_text(json.dumps({"architectures": "8.0"}))
    (tmp_path / "built/exllamav3_ext.so").symlink_to(tmp_path / "gone")
    assert "has no kernels" in load()


@pytest.mark.parametrize(
    ("case", "most", "expected"),
    [("mul1-4", 6, False), ("wide", 6, True), ("wide", 3, False), ("wide-mcg", 6, False), ("wide-2.5", 2, False)],
)
def test_which_artifacts_decode_in_int8(case: str, most: int, expected: bool, tmp_path: Path) -> None:
    """The kernel's rule: 256 divides the outputs, the codebook is mul1, and a half bit counts as a whole one."""
    tensors = parts("mcg-3" if "mcg" in case else "mul1-2.5" if "2.5" in case else "mul1-4")
    if "wide" in case:
        tensors |= {"trellis": np.concatenate([tensors["trellis"]] * 2, axis=1)}
    stored = shards.find(artifact(tmp_path / "exl3", LAYER, tensors)).tensors()
    assert decodes_in_int8(stored, most) == expected


# a converter that fails as the real one does, when it adds padded and unpadded tensors
CONVERTER = """
import argparse
parser = argparse.ArgumentParser()
for name in ("in_dir", "out_dir", "work_dir", "bits", "head_bits", "codebook", "cal_data", "cal_rows", "cal_cols"):
    parser.add_argument(f"--{name}")
prepare = lambda options: ({}, {}, True, "")
def main(settings, state):
    raise RuntimeError("sizes do not match")
"""
CONVERT = """
import sys
from pathlib import Path
from quantmill.build import exl3 as build_exl3
from quantmill.build.quantizer.calibration import Calibration
from quantmill.build.quantizer.program import BuildTask
build_exl3.library = lambda: None
folder, words = Path(sys.argv[1]), {"bits": 4.0, "head_bits": 6, "codebook": "mul1"}
samples = Calibration([[1, 2]], 2, "")
build_exl3.quantize(BuildTask(folder, folder / "out", folder / "resume", words, samples, "", None, {}))
"""


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (576, "ValueError: the hidden size 576 is not a multiple of 128, and this model's layers need one: "),
        (512, "RuntimeError: "),
    ],
)
def test_a_width_that_cannot_be_cut_is_named(
    width: int, line: str, tmp_path: Path, torch_python: Path, call: Callable
) -> None:
    package = tmp_path / "site/exllamav3/conversion"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "convert_model.py").write_text(CONVERTER)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": width}))
    paths = f"{tmp_path / 'site'}:{REPO / 'scripts'}"
    assert (
        call(torch_python, "-c", CONVERT, tmp_path, PYTHONPATH=paths).stderr.splitlines()[-1]
        == line + "sizes do not match"
    )
