"""The workflow through a real Slurm, two nodes on this machine (tests/workflow/slurm.sh); `make test-slurm` runs these.

What one machine cannot show: the cards are links to /dev/null, so that a job sees a card's number and computes on the
CPU; memory limits are kept by Slurm's accounting, which looks once a second, where a cluster has cgroups; a node goes
DOWN because it is told so, and slurmd, not a lack of power, ends its jobs; states come from squeue, since there is no
accounting database; and the file system is shared because it is the same disk, so that nothing is seen late.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import REPO, interpreter
from workflows import wait_for

pytestmark = pytest.mark.slurm

SCRIPT = REPO / "tests/workflow/slurm.sh"
ETC = Path("/etc/slurm")
SNAKEMAKE = ["timeout", "-k", "10", "900", str(Path(sys.executable).with_name("snakemake"))]
SUBMIT = ["--profile", "profiles/slurm", "--slurm-status-command", "squeue"]
SUBMIT += ["--slurm-init-seconds-before-status-checks", "2"]
STUDY = """
models: {demo: {source: demo}}
formats: [fp16, ct2-int8]
device: cpu
texts: {evaluation: evaluation.txt, prompts: prompts.txt}
"""
SCORED = ["fp16", "ct2-int8", "noise-floor"]
ON_A_CARD = {"artifact", "expected_predictions", "reference", "quality", "noise_floor", "latency"}
ELSEWHERE = {"source", "tensors", "safetensors", "tokens", "page"}


def run(*command: str) -> str:
    """Return the output of a command."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def files(folder: Path) -> list[tuple[str, bytes]]:
    """Every file below a folder with its content."""
    return sorted((str(path), path.read_bytes()) for path in folder.rglob("*") if path.is_file())


def slurm_logs(root: Path) -> str:
    """Slurm's logs of the jobs that failed (those of the others are removed)."""
    return "\n".join(f"{path}:\n{path.read_text()}" for path in (root / "artifacts/logs/slurm").rglob("*.log"))


def start(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPT), "start", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)


def jobs(column: str, *options: str) -> dict[str, str]:
    """Slurm's jobs by their comment, which names the rule and its wildcards, and one more column of squeue's."""
    lines = run("squeue", "--noheader", f"--format=%k|{column}", *options).splitlines()
    return dict(line.split("|") for line in lines)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start Slurm; restore /etc/slurm afterwards."""
    folder = tmp_path_factory.mktemp("slurm")
    before = files(ETC)
    started = start(folder)
    if started.returncode:
        pytest.skip(f"no Slurm here: {started.stderr.strip().splitlines()[-1]}")
    try:
        yield folder
    finally:
        subprocess.run([str(SCRIPT), "stop", str(folder)], check=True, timeout=60)
    assert files(ETC) == before


@pytest.fixture(scope="module")
def make_study(checkout: Callable[[], Path]) -> Callable[[], Path]:
    """Copy the project with short texts, and a Python that records when it ran what on which GPU."""
    environments = {env: interpreter(env) for env in ("torch", "tools")}

    def make() -> Path:
        root = checkout()
        text = (root / "config/evaluation.txt").read_text()
        (root / "evaluation.txt").write_text(text[: len(text) // 5])
        (root / "prompts.txt").write_text("".join((root / "config/prompts.txt").read_text().splitlines(True)[:2]))
        recorder = root / "python"
        recorder.write_text(
            "#!/bin/bash\n"
            f'log() {{ echo "$(date +%s.%N) $1 $$ ${{CUDA_VISIBLE_DEVICES-none}} $3 $4" >> {root}/ran; }}\n'
            f'[ -z "${{RECORDED-}}" ] || exec {environments["torch"]} "$@"\n'  # started by one that is written down
            f'export RECORDED=1; log begin "$@"\n'
            f'{environments["torch"]} "$@"; status=$?; log end "$@"; exit $status\n'
        )
        recorder.chmod(0o755)
        interpreters = {"torch": str(recorder), "tools": str(environments["tools"])}
        for name, times in (("study", 1), ("endless", 1000)):
            latency = f"latency: {{new_tokens: 8, repeats: {times}, processes: {times}, prompt_tokens: []}}\n"
            content = f"{STUDY}{latency}interpreters: {json.dumps(interpreters)}\n"
            (root / f"{name}.yaml").write_text(content)
        return root

    return make


@pytest.fixture(scope="module")
def plain(make_study: Callable[[], Path]) -> Path:
    """Measure the study's quality on one machine, without Slurm."""
    root = make_study()
    targets = [f"artifacts/demo/quality/{name}.json" for name in SCORED]
    command = [*SNAKEMAKE, "--cores", "8", *targets, "--configfile", "study.yaml"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return root


@pytest.fixture(scope="module")
def study_run(cluster: Path, make_study: Callable[[], Path]) -> Path:
    """Run the study through Slurm."""
    root = make_study()
    command = [*SNAKEMAKE, *SUBMIT, "report", "--configfile", "study.yaml"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr + slurm_logs(root)
    shutil.copy(root / "ran", root / "ran-first")
    return root


@pytest.fixture(scope="module")
def failed_run(study_run: Path) -> tuple[Path, str]:
    """Run it again; Slurm ends some jobs: one cancelled, one over its memory, one over its time. With
    what Snakemake printed."""
    (study_run / "artifacts/demo/quality/noise-floor.json").unlink()
    (study_run / "ran").unlink()
    limits = ["--set-resources", "noise_floor:mem_mb=300", "latency:runtime=1"]
    command = [*SNAKEMAKE, *SUBMIT, *limits, "--retries", "0", "--configfile", "endless.yaml", "--", "report"]
    with (study_run / "printed").open("w+") as printed:
        process = subprocess.Popen(command, cwd=study_run, stdout=printed, stderr=subprocess.STDOUT)
        decoding = "latency.measure artifacts/demo/fp16"
        wait_for(lambda: (study_run / "ran").exists() and decoding in (study_run / "ran").read_text())
        run("scancel", jobs("%i", "--states=running")["rule_latency_wildcards_demo_fp16"])
        assert process.wait() == 1
        printed.seek(0)
        return study_run, printed.read()


def resume_node() -> bool:
    """Bring the node back; Slurm refuses where it has come back by itself, as a daemon that registers anew does."""
    subprocess.run(("scontrol", "update", "nodename=gpu1", "state=resume"), capture_output=True, timeout=60)
    return "down" not in run("sinfo", "--noheader", "--nodes=gpu1", "--format=%T")


@pytest.fixture(scope="module")
def repaired_run(failed_run: tuple[Path, str]) -> Path:
    """Run it again without these limits, while the node with the GPUs goes DOWN and comes back."""
    root, _ = failed_run
    command = [*SNAKEMAKE, *SUBMIT, "report", "--configfile", "study.yaml"]
    with (root / "printed").open("w+") as printed:
        process = subprocess.Popen(command, cwd=root, stdout=printed, stderr=subprocess.STDOUT)
        job = "rule_latency_wildcards_demo_fp16"
        wait_for(lambda: job in jobs("%i", "--states=running"))
        number = jobs("%i", "--states=running")[job]
        run("scontrol", "update", "nodename=gpu1", "state=down", "reason=test")
        wait_for(lambda: jobs("%T")[job] == "PENDING")
        assert process.poll() is None
        wait_for(resume_node)
        status = process.wait()
        printed.seek(0)
        assert status == 0, printed.read() + slurm_logs(root)
    assert "Restarts=1" in run("scontrol", "show", "job", number)
    return root


def quality(root: Path, name: str) -> dict:
    result = json.loads((root / f"artifacts/demo/quality/{name}.json").read_text())
    return {key: result[key] for key in ("summary", "windows")}


def failure_reason(printed: str, rule: str) -> str:
    """Return Snakemake's line about the failure of a rule's job."""
    _, _, after = printed.partition(f"Error in rule {rule}:\n")
    return after.split("\n", 1)[0]


def test_a_start_that_fails_restores_what_was_there(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("slurmctld"):
        pytest.skip("only root can replace /etc/slurm, and slurm-wlm must be installed")
    (tmp_path / "slurmctld").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "slurmctld").chmod(0o755)
    before = files(ETC)
    result = start(tmp_path / "slurm", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.returncode == 1
    assert files(ETC) == before
    assert not Path("/etc/slurm.before-test").exists()


@pytest.mark.parametrize("name", SCORED)
def test_quality_is_the_same_through_slurm(study_run: Path, plain: Path, name: str) -> None:
    assert quality(study_run, name) == quality(plain, name)


def test_only_measurements_go_to_a_gpu(study_run: Path) -> None:
    partitions = {"cpu": set(), "gpu": set()}
    for comment, partition in jobs("%P", "--states=all").items():
        partitions[partition].add(comment.removeprefix("rule_").split("_wildcards")[0])
    assert partitions == {"cpu": ELSEWHERE, "gpu": ON_A_CARD}


def test_jobs_never_share_a_card(study_run: Path) -> None:
    times: dict[tuple[str, str], dict[str, float]] = {}
    programs = set()
    for line in (study_run / "ran-first").read_text().splitlines():
        when, what, process, card, program, _ = line.split(" ")
        programs |= {(program, card == "none")}
        times.setdefault((card, process), {})[what] = float(when)
    on_a_card = {"gate.expected", "gate.check", "build.ct2", "quality.measure"}
    elsewhere = {("fetch.name_tensors", True), ("tokens.tokenize_texts", True)}
    assert programs == {(name, False) for name in on_a_card | {"latency.measure"}} | elsewhere
    spans = {card: sorted((t["begin"], t["end"]) for (c, _), t in times.items() if c == card) for card in ("0", "1")}
    for on_one_card in spans.values():
        assert len(on_one_card) > 1
        assert all(one[1] < other[0] for one, other in pairwise(on_one_card))
    # both cards at once: profiles/default's limit of one measurement at a time is one machine's
    assert any(a[0] < b[1] and b[0] < a[1] for a in spans["0"] for b in spans["1"])


def test_a_job_over_its_memory_says_why(failed_run: tuple[Path, str]) -> None:
    root, printed = failed_run
    assert "SLURM status is: 'FAILED'" in failure_reason(printed, "noise_floor")
    (log,) = (root / "artifacts/logs/slurm/rule_noise_floor").rglob("*.log")
    assert str(log) in printed
    assert "exceeded memory limit" in log.read_text()
    assert not (root / "artifacts/demo/quality/noise-floor.json").exists()


def test_cancelled_and_timed_out_jobs_leave_nothing(failed_run: tuple[Path, str]) -> None:
    root, printed = failed_run
    assert "SLURM status is: 'CANCELLED'" in printed
    assert "SLURM status is: 'TIMEOUT'" in printed
    assert "Traceback" not in printed
    assert list((root / "artifacts/demo").glob("latency/*")) == []


def test_a_rerun_waits_for_a_down_node(repaired_run: Path, plain: Path) -> None:
    assert {path.name for path in (repaired_run / "artifacts/demo/latency").iterdir()} == {"fp16.json", "ct2-int8.json"}
    assert quality(repaired_run, "noise-floor") == quality(plain, "noise-floor")
    rows = json.loads((repaired_run / "artifacts/report/results.json").read_text())["rows"]
    assert all(row["tokens_per_second"] for row in rows)
