"""An engine in another process: each answer is stored as it comes, and requested once."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO
from fake_engine import VOCAB, Fake

from quantmill import engines
from quantmill.common.program import UserError
from quantmill.metrics import perplexity
from quantmill.tasks import worker
from quantmill.tasks.answers import Answers, ask

# answers each entry with its number of ids, writes 5, 6, 7 …, and notes what it was asked
FAKE = """
import json, sys
facts = {"versions": {"fake": sys.argv[2]}, "device": {"device": sys.argv[3], "name": "one", "free": sys.argv[4]}}
print(json.dumps({"ends": True} | facts), flush=True)
for line in iter(sys.stdin.readline, ""):
    asked = json.loads(line)
    with open(sys.argv[1], "a") as log:
        log.write(line)
    if "write" in asked:
        for token in range(5, 5 + asked["tokens"]):
            print(token, flush=True)
            if not json.loads(sys.stdin.readline()):
                break
        print("null", flush=True)
        continue
    for ids, continuations in asked["score"]:
        if 13 in ids:
            sys.exit("error: the engine has no token 13")
        print(json.dumps([[-len(ids), True] for _ in continuations]), flush=True)
"""
ENTRIES = [([1, 2, 3], [[4]]), ([1], [[2], [3]]), ([1, 2], [[9]])]
FOUND = [[(-3, True)], [(-1, True), (-1, True)], [(-2, True)]]
KEY = {"files": "abc"}


@pytest.fixture
def start(tmp_path: Path) -> Callable:
    (tmp_path / "fake.py").write_text(FAKE)
    command = [sys.executable, tmp_path / "fake.py", tmp_path / "log"]

    def run(
        use: Callable[[Answers], object], key: dict = KEY, facts: tuple[str, str, str] = ("1", "cpu", "9")
    ) -> object:
        with ask([*command, *facts], tmp_path / "kept.jsonl", key) as answers:
            answers.start()
            return use(answers)

    return run


def read_questions(folder: Path) -> list[list]:
    lines = (folder / "log").read_text().splitlines()
    return [entry for line in lines for entry in json.loads(line).get("score", ["text"])]


def test_answers_come_in_order_and_are_asked_once(start: Callable, tmp_path: Path) -> None:
    assert start(lambda answers: list(answers.score(ENTRIES))) == FOUND
    assert start(lambda answers: (list(answers.score(ENTRIES[::-1])), answers.asked)) == (FOUND[::-1], 0)
    assert len(read_questions(tmp_path)) == 3


def test_a_killed_run_sends_only_the_rest(start: Callable, tmp_path: Path) -> None:
    start(lambda answers: list(answers.score(ENTRIES)))
    kept = tmp_path / "kept.jsonl"
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(lines[:2]) + lines[2][:10])  # a line that was being written
    (tmp_path / "log").unlink()
    assert start(lambda answers: list(answers.score(ENTRIES))) == FOUND
    assert [ids for ids, _ in read_questions(tmp_path)] == [[1], [1, 2]]
    assert kept.read_text() == "".join(lines)


def test_damaged_answers_are_sent_again(start: Callable, tmp_path: Path) -> None:
    start(lambda answers: list(answers.score(ENTRIES)))
    kept = tmp_path / "kept.jsonl"
    lines = kept.read_bytes().splitlines(keepends=True)
    kept.write_bytes(b"".join(lines[:3]) + b"\0" * 40 + b"\n" + lines[3])
    assert start(lambda answers: (list(answers.score(ENTRIES)), answers.asked)) == (FOUND, 1)
    assert kept.read_bytes() == b"".join(lines)


def test_other_weights_or_code_discard_answers(start: Callable, tmp_path: Path) -> None:
    start(lambda answers: list(answers.score(ENTRIES)))
    assert start(lambda answers: (list(answers.score(ENTRIES)), answers.asked), {"files": "other"}) == (FOUND, 3)


@pytest.mark.parametrize(
    ("facts", "asked"), [(("2", "cpu", "9"), 3), (("1", "cuda", "9"), 3), (("1", "cpu", "of other free memory"), 0)]
)
def test_another_library_or_device_discards_answers(start: Callable, facts: tuple[str, str, str], asked: int) -> None:
    start(lambda answers: list(answers.score(ENTRIES)))
    assert start(lambda answers: (list(answers.score(ENTRIES)), answers.asked), facts=facts) == (FOUND, asked)


def test_the_caller_ends_a_text(start: Callable, tmp_path: Path) -> None:
    def write(answers: Answers) -> tuple[list[int], list[int], int]:
        some = answers.write([1], 10, lambda written: written[-1] == 7, ["."])
        return some, answers.write([1], 2, lambda written: False, []), answers.asked

    assert start(write) == ([5, 6, 7], [5, 6], 2)
    assert start(write) == ([5, 6, 7], [5, 6], 0)


def test_the_error_is_the_processs_last_line(start: Callable) -> None:
    with pytest.raises(UserError, match="the engine's process failed: the engine has no token 13"):
        start(lambda answers: list(answers.score([*ENTRIES, ([13], [[1]])])))
    with pytest.raises(UserError, match="no token 13"):  # and what came before is kept
        start(lambda answers: list(answers.score([([13], [[1]])])))
    assert start(lambda answers: (list(answers.score(ENTRIES)), answers.asked)) == (FOUND, 0)


def test_scores_are_sums_and_greedy_flags() -> None:
    engine = Fake()
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    table = perplexity.log_softmax(engine.table)
    likeliest = [int(engine.table[token].argmax()) for token in ids[-2:]]
    continuations = [[2, 6, 7], likeliest, [8]]
    (found,) = worker.score(engine, [(ids, continuations)], VOCAB)
    expected = [table[9, 2] + table[2, 6] + table[6, 7], sum(table[[2, 6], likeliest]), table[6, 8]]
    assert [each[0] for each in found] == pytest.approx(expected, rel=1e-6)
    assert [each[1] for each in found][1] is True
    assert found[0][1] is bool(engine.table[9].argmax() == 2 and likeliest == [6, 7])


def test_texts_together_are_answered_like_single_ones() -> None:
    engine = Fake()
    entries = [(list(range(1, 1 + size)), [[size % VOCAB], [1] * min(size, 4)]) for size in (9, 7, 7, 3, 1)]
    together = list(worker.score(engine, entries, VOCAB))
    assert together == [found for entry in entries for found in worker.score(engine, [entry], VOCAB)]


def test_tokens_beyond_the_models_vocabulary_take_no_part() -> None:
    engine = Fake()
    engine.table[:, -1] = 50  # what pads it
    (found,) = worker.score(engine, [([1, 2], [[3]])], VOCAB - 1)
    assert found[0][0] == pytest.approx(perplexity.log_softmax(engine.table[:, :-1])[2, 3])


def test_too_few_or_infinite_logits_are_refused() -> None:
    with pytest.raises(UserError, match="logits of 1 positions, not 2"):
        list(worker.score(Fake(drop=1), [([1, 2, 3], [[4, 5]])], VOCAB))
    broken = Fake()
    broken.table[2, 0] = np.inf
    with pytest.raises(UserError, match="not finite"):
        list(worker.score(broken, [([1, 2], [[3]])], VOCAB))


class Told(engines.Engine):
    """An engine that tells log-probabilities of a given text, and its two likeliest tokens or none."""

    capabilities = frozenset({"target_logprobs"})

    def __init__(self, top: int) -> None:
        self.top = top

    def target_logprobs(self, ids: list[int]) -> engines.Targets:
        own = np.array([-1.0 if token == 4 else -2.0 for token in ids[1:]])
        top = np.full((len(own), self.top), -1.0)
        return engines.Targets(own, np.full((len(own), self.top), 4), top)


def test_likeliest_tokens_decide_greedy_without_logits() -> None:
    assert list(worker.score(Told(2), [([1, 2], [[4], [5], [2, 4]])], VOCAB)) == [
        [(-1.0, True), (-2.0, False), (-3.0, False)]
    ]
    with pytest.raises(UserError, match="does not report its likeliest tokens"):
        list(worker.score(Told(0), [([1, 2], [[4]])], VOCAB))


# what an engine on a GPU yields, here on a CPU; and transformers' batches of texts beside one text at a time
TENSORS = """
import json, sys
from pathlib import Path
sys.path.insert(0, "scripts")
import numpy as np, torch
from quantmill import engines
from quantmill.common.program import UserError
from quantmill.tasks import worker
rng = np.random.default_rng(3)
rows = rng.normal(0, 3, (6, 50)).astype(np.float32)
continuations = [[4, 9, 2, 7, 1, 30], [int(rows[-1].argmax())], [3, 3]]
read = lambda chunk: [worker.read(chunk[low:low + 4], continuations, 6, low) for low in (0, 4)]
found = [worker.answers(read(chunk), continuations, 6) for chunk in (rows, torch.from_numpy(rows))]
engine = engines.load("transformers", Path(sys.argv[1]), "cpu", 1)
texts = [list(range(5, 5 + size)) for size in (300, 150, 90, 88, 40, 12, 1)]
entries = [(ids, [[7], [8, 9, 10][:len(ids)]]) for ids in texts]
together = list(worker.score(engine, entries, 2048))
alone = [each for entry in entries for each in worker.score(engine, [entry], 2048)]
streamed = engines.load("transformers", Path(sys.argv[1]), "cpu", 1, stream=True)
blocks = list(worker.score(streamed, entries, 2048))
try:
    worker.write(streamed, texts[0], 2, iter([]), sys.stdout)
except UserError as error:
    refused = str(error)
print(json.dumps({"kinds": found, "together": together, "alone": alone, "blocks": blocks, "refused": refused,
                  "batches": list(engine._batches(texts))}))
"""


def test_tensors_and_batches_are_read_alike(
    call: Callable, tmp_path: Path, torch_python: Path, tools_python: Path
) -> None:
    steps = [
        ("fetch.link", REPO / "demo", tmp_path / "source", "--kind", "demo"),
        ("checkpoint.to_safetensors", tmp_path / "source", tmp_path / "safetensors"),
        ("build.fp16", tmp_path / "safetensors", tmp_path / "fp16"),
    ]
    for program, *arguments in steps:
        assert call(tools_python, "scripts/quantmill", program, *arguments).returncode == 0
    result = call(torch_python, "-c", TENSORS, tmp_path / "fp16")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    arrays, tensors = found["kinds"]
    assert [each[0] for each in arrays] == pytest.approx([each[0] for each in tensors], rel=1e-12)
    assert [each[1] for each in arrays] == [each[1] for each in tensors] == [False, True, False]
    assert found["batches"] == [[0], [1, 2, 3], [4, 5, 6]]  # at most 512 tokens, as wide as the longest
    for one, other in zip(2 * found["alone"], found["together"] + found["blocks"], strict=True):
        assert [each[0] for each in one] == pytest.approx([each[0] for each in other], abs=1e-4)
        assert [each[1] for each in one] == [each[1] for each in other]
    assert found["refused"] == (
        "transformers cannot decode: the model runs block by block, and would be read anew for each token"
    )
