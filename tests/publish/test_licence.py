"""An artifact has its source's licence, or the one that the study names."""

import pytest
from published_study import HEAD, Study


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (None, "names no licence"),
        ("# A model\n", "names no licence"),
        ("---\nlicense: [\n---\n", "names no licence"),
        ("---\nlicense: unknown\n---\n", "names no licence"),
        ("---\nlicense: other\n---\n", "names no licence"),
        ("---\nlicense: cc-by-nc-nd-4.0\n---\n", "its licence, cc-by-nc-nd-4.0, forbids derivatives"),
        ("---\nlicense: CC-BY-ND-4.0\n---\n", "forbids derivatives"),
    ],
    ids=["no card", "no head", "damaged", "unknown", "other", "no derivatives", "in capitals"],
)
def test_a_source_without_a_usable_licence_is_refused(study: Study, head: str | None, reason: str) -> None:
    card = study.source / "README.md"
    card.unlink()
    if head:
        card.write_text(head)
    result = study.push("gptq-int4")
    assert result.returncode == 1
    assert result.stderr.startswith("error: artifacts/demo/source: ")
    assert reason in result.stderr
    assert "set publish: {license: ID}" in result.stderr
    assert not study.hub.log  # before the hub is asked for anything


def test_the_studys_licence_replaces_the_sources(study: Study) -> None:
    (study.source / "README.md").write_text("---\nlicense: cc-by-nc-nd-4.0\n---\n")
    found = study.published("gptq-int4", more=("--source", "artifacts/demo/source", "--license", "mit"))
    assert study.head(found["README.md"])["head"]["license"] == "mit"


def test_a_custom_licence_is_uploaded_with_its_text(study: Study) -> None:
    words = "license: other\nlicense_name: acme-1\nlicense_link: https://acme.test/licence\n"
    (study.source / "README.md").write_text(HEAD.replace("license: apache-2.0\n", words))
    (study.source / "LICENSE.txt").write_text("Terms.\n")
    (study.source / "NOTICE").write_text("Notice.\n")
    files = study.published("gptq-int4")
    assert (files["LICENSE.txt"], files["NOTICE"]) == (b"Terms.\n", b"Notice.\n")
    head = study.head(files["README.md"])["head"]
    found = [head[key] for key in ("license", "license_name", "license_link")]
    assert found == ["other", "acme-1", "https://acme.test/licence"]
