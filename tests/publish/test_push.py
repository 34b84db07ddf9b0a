"""Publish with the real huggingface_hub client to a hub on this machine."""

import hashlib
import json
import os
import signal
import subprocess

import pytest
from conftest import REPO
from hub_server import Fault, Hub, Repository
from program_fixtures import Result
from published_study import TOKEN, Study
from workflows import wait_for

NAME = "models/acme/demo"


def refusal(study: Study, result: Result) -> str:
    """Return the last line of a refused upload without the repository, and check that no token is in it."""
    assert result.returncode == 1, result.stdout
    assert "Traceback" not in result.stderr
    assert TOKEN not in result.stderr + result.stdout
    assert study.receipt() is None
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: acme/demo: "), line
    return line.removeprefix("error: acme/demo: ")


def test_the_repository_equals_the_local_files(hub: Hub, study: Study) -> None:
    result = study.push("gptq-int4")
    assert result.returncode == 0, result.stderr
    found = hub.repositories[NAME]
    assert found.token == TOKEN  # private, unless the study says otherwise
    folder = study.root / "artifacts/demo/gptq-int4"
    for name in ("config.json", "model.safetensors"):
        assert found.files[name] == (folder / name).read_bytes()
    others = {"README.md", "results.json", "study.yaml", "quality-speed.png", "quantmill.json", ".gitattributes"}
    assert found.files.keys() == {"config.json", "model.safetensors"} | others
    manifest = json.loads(found.files["quantmill.json"])
    assert manifest["files"].keys() == found.files.keys() - {"quantmill.json", ".gitattributes"}
    for name, words in manifest["files"].items():
        assert (words["bytes"], words["sha256"]) == (
            len(found.files[name]),
            hashlib.sha256(found.files[name]).hexdigest(),
        )
    receipt = study.receipt()
    assert (receipt["repository"], receipt["commit"]) == ("acme/demo", found.commit)
    assert receipt["files"]["model.safetensors"] == manifest["files"]["model.safetensors"]
    parts = [path for method, path, _ in hub.log if method == "PUT" and path.count("/") == 3]
    assert len(parts) == 3  # 3 MB in parts of 1 MB
    asked = [path for method, path, _ in hub.log if method == "GET"]
    assert asked[-1].endswith(f"/revision/{found.commit}")  # every hash is asked for after the commit


def test_a_second_upload_sends_only_changes(hub: Hub, study: Study) -> None:
    assert study.push("gptq-int4").returncode == 0
    before = len(hub.log)
    result = study.push("gptq-int4")
    assert "nothing to send" in result.stdout
    assert {method for method, *_ in hub.log[before:]} <= {"GET", "HEAD"}
    assert len(hub.storage.commits) == 1
    study.row("gptq-int4")["perplexity"] = 51.25
    study.write()
    assert study.push("gptq-int4").returncode == 0
    assert sorted(hub.storage.commits[1]) == ["README.md", "quality-speed.png", "quantmill.json", "results.json"]
    assert "51.25" in hub.repositories[NAME].files["README.md"].decode()


@pytest.mark.long
def test_the_plot_shows_this_model_alone(hub: Hub, study: Study) -> None:
    study.draws = True
    assert study.push("gptq-int4").returncode == 0
    plot = hub.repositories[NAME].files["quality-speed.png"]
    assert plot.startswith(b"\x89PNG")
    assert len(plot) > 1000
    study.add_row("fp16", model="private")
    study.write()
    assert "nothing to send" in study.push("gptq-int4").stdout
    study.row("gptq-int4")["deployed_tokens_per_second"] *= 2
    study.write()
    assert study.push("gptq-int4").returncode == 0
    assert hub.repositories[NAME].files["quality-speed.png"] != plot


@pytest.mark.long
def test_a_killed_upload_sends_only_the_rest_later(hub: Hub, study: Study) -> None:
    study.build(
        "gptq-int4",
        {
            "model-00001-of-00002.safetensors": 400_000,
            "model-00002-of-00002.safetensors": 30_000_000,
            "model.safetensors": 1,
        },
    )
    hub.storage.part = 10**9
    large = hashlib.sha256(
        (study.root / "artifacts/demo/gptq-int4/model-00002-of-00002.safetensors").read_bytes()
    ).hexdigest()
    hub.faults = [Fault(f"PUT /lfs/{large}", delay=0.05, times=1)]
    command = [study.python, REPO / "scripts/quantmill", *study.command("gptq-int4"), "--license", "mit"]
    process = subprocess.Popen(command, cwd=study.root, env=study.environment(), stderr=subprocess.PIPE)
    wait_for(lambda: hub.storage.received.get(large, 0) > 1_000_000 and len(hub.storage.objects) == 3, 60)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert hub.repositories[NAME].files.keys() == {".gitattributes"}  # nothing half-done
    whole = {oid: hub.storage.received[oid] for oid in hub.storage.objects}
    assert large not in whole
    wait_for(lambda: hub.faults[0].times == 0)
    result = study.push("gptq-int4", more=("--license", "mit"))
    assert result.returncode == 0, result.stderr
    assert {oid: hub.storage.received[oid] for oid in whole} == whole  # not one byte of these again
    assert len(hub.repositories[NAME].files["model-00002-of-00002.safetensors"]) == 30_000_000


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"notes.txt": b"mine"}, "holds something else, and no quantmill.json"),
        ({"quantmill.json": b"[]"}, "its quantmill.json is not of an upload of Quantmill"),
        ({"quantmill.json": b'{"artifacts": {}, "files": {}, "model": "other"}'}, "holds another model, 'other'"),
    ],
    ids=["something else", "no manifest", "another model"],
)
def test_other_files_are_overwritten_only_on_request(
    hub: Hub, study: Study, files: dict[str, bytes], reason: str
) -> None:
    hub.repositories[NAME] = Repository(dict(files), token=TOKEN)
    said = refusal(study, study.push("gptq-int4"))
    assert said.startswith(reason)
    assert "set publish: {overwrite: true}" in said
    assert hub.repositories[NAME].files == files
    assert study.push("gptq-int4", more=("--license", "mit", "--overwrite")).returncode == 0
    assert "notes.txt" not in hub.repositories[NAME].files
    assert "model.safetensors" in hub.repositories[NAME].files


def test_changes_on_the_hub_are_not_lost(hub: Hub, study: Study) -> None:
    assert study.push("gptq-int4").returncode == 0
    (study.root / "artifacts/demo/published/x.json").unlink()
    mine = hub.repositories[NAME]
    for change in ({"README.md": b"by hand"}, {"picture.png": b"by hand"}):
        hub.repositories[NAME] = Repository(mine.files | change, token=TOKEN)
        assert f"'{next(iter(change))}' was added or changed since the upload" in refusal(
            study, study.push("gptq-int4")
        )
        assert hub.repositories[NAME].files == mine.files | change


def test_files_of_an_older_upload_are_removed(hub: Hub, study: Study) -> None:
    study.build("gptq-int4", {"model-00001-of-00002.safetensors": 10, "model-00002-of-00002.safetensors": 10})
    assert study.push("gptq-int4").returncode == 0
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (study.root / "artifacts/demo/gptq-int4" / name).unlink()
    study.build("gptq-int4", {"model.safetensors": 20})
    assert study.push("gptq-int4").returncode == 0
    weights = {name for name in hub.repositories[NAME].files if name.endswith(".safetensors")}
    assert weights == {"model.safetensors"}


def test_a_public_repository_is_refused_when_private(hub: Hub, study: Study) -> None:
    hub.repositories[NAME] = Repository({".gitattributes": b""})
    assert "is public, and the study says private" in refusal(study, study.push("gptq-int4"))
    more = ("--license", "mit", "--public")
    assert study.push("gptq-int4", more=more).returncode == 0
    assert study.push("gptq-int4", more=more, repository="acme/new").returncode == 0
    assert hub.repositories["models/acme/new"].token is None


STORAGE = {"X-Error-Message": "Private repository storage limit reached"}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("POST /api/repos/create", status=401), "the hub does not accept your token (401)"),
        (Fault("POST /api/repos/create", status=403), "your token may not write there (403); give it write access"),
        (Fault("/preupload/", status=403), "your token may not write there (403)"),
        (Fault("POST /api/repos/create", status=402), "the hub has no room for it (402)"),
        (Fault("/preupload/", status=403, headers=STORAGE), "the hub has no room for it (403)"),
        (Fault("/objects/batch", status=413), "the hub has no room for it (413)"),
        (Fault("POST /api/repos/create", status=409), "the repository was created or changed meanwhile (409)"),
        (Fault("/commit/", status=412), "the repository was created or changed meanwhile (412)"),
        (Fault("/commit/", status=503), "answers 503; run again later"),
        (Fault("GET /api/models", status=429, times=1), "the hub asks to slow down (429)"),
        (Fault("/commit/", drop_after=10), "the connection to http://127.0.0.1"),
        (Fault("/commit/", corrupt=True), "the hub has another model.safetensors than was sent"),
    ],
    ids=lambda value: (
        None if isinstance(value, str) else f"{value.status or 'dropped' if not value.corrupt else 'hash'}"
    ),
)
def test_a_refused_upload_continues_in_the_next_run(hub: Hub, study: Study, fault: Fault, reason: str) -> None:
    hub.faults = [fault]
    assert reason in refusal(study, study.push("gptq-int4"))
    hub.faults = []
    more = ("--license", "mit", *(["--overwrite"] if fault.corrupt else []))
    result = study.push("gptq-int4", more=more)
    assert result.returncode == 0, result.stderr
    assert study.receipt()["commit"] == hub.repositories[NAME].commit


def test_a_commit_with_a_lost_answer_is_found(hub: Hub, study: Study) -> None:
    hub.faults = [Fault("/commit/", mute=True, times=1)]
    assert "the connection to http://127.0.0.1" in refusal(study, study.push("gptq-int4"))
    result = study.push("gptq-int4")
    assert "nothing to send" in result.stdout, result.stderr
    assert len(hub.storage.commits) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("PUT /lfs", status=500), "answers 500"),
        (Fault("PUT /lfs", drop_after=1000), "the connection to http://127.0.0.1"),
    ],
    ids=["500", "dropped"],
)
def test_missing_storage_is_one_line(hub: Hub, study: Study, fault: Fault, reason: str) -> None:
    hub.faults = [fault]  # the client tries five times, which takes half a minute
    assert reason in refusal(study, study.push("gptq-int4"))


def test_changed_weights_are_not_a_prebuilt_artifact(hub: Hub, study: Study) -> None:
    assert study.push("gptq-int4").returncode == 0
    hub.repositories[NAME].files["model.safetensors"] = b"theirs"
    command = ["fetch.prebuilt", "acme/demo", "out", "--revision=main", "--model=x"]
    command += ["--layout=gptq", "--format=theirs", "--engine=gptqmodel"]
    result = study.run(*command, folder=study.root, environment=study.environment())
    reason = "does not have the SHA-256 that quantmill.json next to it names; fetch it again"
    assert result.stderr == f"error: acme/demo/model.safetensors: {reason}\n"
    assert not (study.root / "out").exists()


def test_temporary_errors_are_retried(hub: Hub, study: Study) -> None:
    hub.faults = [Fault("PUT /lfs", times=1, status=503), Fault("/objects/batch", times=1, drop_after=10)]
    result = study.push("gptq-int4")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"HF_TOKEN": ""}, "there is no token; set HF_TOKEN"),
        ({"HF_TOKEN": "bad_token"}, "the hub does not accept your token (401)"),
        ({"HF_TOKEN": "hf_readsalone"}, "your token may not write there (403)"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the connection to http://127.0.0.1:9 broke"),
    ],
    ids=["none", "bad", "scope", "offline", "no network"],
)
def test_tokens_and_networks(study: Study, environment: dict[str, str], reason: str) -> None:
    assert reason in refusal(study, study.push("gptq-int4", **environment))


@pytest.mark.parametrize(
    ("status", "reason"),
    [(401, "does not accept your token (401)"), (403, "may not write there (403)"), (404, "has no such repository")],
)
def test_errors_of_xet_are_one_line(hub: Hub, study: Study, status: int, reason: str) -> None:
    hub.faults = [Fault("/xet-write-token/", status=status)]
    assert reason in refusal(study, study.push("gptq-int4", HF_HUB_DISABLE_XET="0"))


def test_a_token_of_hf_auth_login_works(hub: Hub, study: Study) -> None:
    (study.root / "home").mkdir()
    (study.root / "home/token").write_text(TOKEN)
    result = study.push("gptq-int4", HF_TOKEN="")
    assert result.returncode == 0, result.stderr


def test_a_changed_artifact_is_refused(hub: Hub, study: Study) -> None:
    weights = study.root / "artifacts/demo/gptq-int4/model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    said = study.push("gptq-int4").stderr
    assert "model.safetensors: has changed since quantmill.json was written" in said
    assert not hub.repositories
