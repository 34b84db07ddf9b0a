"""One module per engine, all with the same contract; the rest of Quantmill knows engines by this contract alone.

An engine's module holds a class `Engine` and imports its libraries; it is imported inside its own environment.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import traceback
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

from quantmill import devices
from quantmill.common.program import PACKAGE, UserError, first_line, suggestion
from quantmill.devices import cuda
from quantmill.engines.head import Head
from quantmill.engines.served.attached_servers import SERVERS
from quantmill.metrics.footprint import Footprint
from quantmill.metrics.targets import Targets as Targets

CHUNK_LOGITS = 2**25  # values of a chunk on a CPU, 128 MiB: a product of half as many rows takes a tenth longer
CHUNK_POSITIONS = {"cpu": 512, "cuda": 2048}  # of a chunk, at most
# Bytes of a GPU for each value of a chunk. The comparison takes 28 of them; fewer values take no less time, because the
# start of a kernel takes longer than its work on them
CHUNK_SHARE = 1024

# A variable that is set where an artifact is checked (gate/check.py), and not where it is measured: an engine whose
# products are off by more than rounding on this processor then uses others, however slow
EXACT = "QUANTMILL_EXACT"

# logits, target_logprobs: it has the method; batches: `decode` takes several prompts; multi_gpu: it runs on several
# GPUs at once; own_threads: it chooses its number of CPU threads
Capability = Literal["logits", "target_logprobs", "batches", "multi_gpu", "own_threads"]


class CannotDecode(UserError):
    """A way to decode does not fit this model, which showed when it was tried."""


class Engine:
    """A loaded artifact on a device."""

    name: ClassVar[str]  # by which it is registered; `find` sets it, and by default it is that of the module
    capabilities: frozenset[Capability] = frozenset({"logits"})  # what it lacks is an empty cell, with the reason
    compute_type: str  # the arithmetic that the library reports
    modes: tuple[str, ...]  # ways to decode this artifact on this device, the plain one first
    mode: str  # the one in use, `modes[0]` at first; set it to choose another
    here: bool = True  # whether it is known to run on this machine, so that the device here is its own
    stop_ids: list[int]  # end-of-sequence tokens, which it never chooses
    goes_on: ClassVar[bool] = False  # whether it decodes on after one, so that `allow_eos` need only empty `stop_ids`
    can_end: ClassVar[bool] = False  # whether `allow_eos` has another effect, which is `may_end`
    may_end: bool = False
    environment: Mapping[str, str] = {}  # environment variables that the run sets
    threads: int | None = None  # CPU threads in use, where that is another number than it was given
    no_decoding: str | None = None  # why it cannot decode this model here
    sent: float | None = None  # when the last request to a server was sent: the client builds it and connects before
    text: str | None = None  # the last text after the first prompt, of a server that returns no token ids

    def __init_subclass__(cls) -> None:
        cls.name = cls.__module__.rpartition(".")[2].replace("_", "-")
        if "modes" in vars(cls):
            cls.mode = cls.modes[0]

    def __init__(self, artifact: Path, device: str, threads: int, **options: Any) -> None:
        """Load `artifact` on `device` (`cpu`, or `cuda`: every visible GPU) with `threads` CPU threads.

        Raises `UserError` where the device, the artifact or an option does not fit.
        """

    def decode(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
        """Yield the `n` greedy tokens after each prompt (all of one length) as they come: the prompt's number, the
        token's id, and the `time.perf_counter()` at which it was on the host.

        The engine takes the time, because only it knows: a token that passes through another thread may wait for that
        thread. End-of-sequence tokens are never chosen, so that every engine decodes the same number of tokens. Several
        prompts are decoded the plain way. Raises `CannotDecode` where the mode in use does not fit the model.
        """
        raise NotImplementedError

    def logits(self, ids: list[int]) -> Iterator[Any]:
        """Yield float32 logits in chunks [positions, vocab] that together cover every position of `ids`, in order.

        They are numpy arrays, or tensors on a GPU. The next chunk may overwrite one.
        """
        raise NotImplementedError

    def read_ahead(self, texts: Sequence[list[int]]) -> None:
        """Take note of the texts whose `logits` or `states` come next, each once. An engine whose model does not fit
        runs them together, and any other text alone."""

    def head(self, ids: list[int]) -> Head | None:
        """Return the head that makes `logits` of `states`, on whose logits the model agrees after `ids`; None where
        there is none, or more than a scale and a cap follows it."""
        return None

    def states(self, ids: list[int]) -> Iterator[Any]:
        """Yield what the model's head reads, in chunks [positions, hidden], as `logits` yields logits.

        An engine with a `head` has them.
        """
        raise NotImplementedError

    def target_logprobs(self, ids: list[int]) -> Targets:
        """Return the log-probability of each id except the first, given those before it."""
        raise NotImplementedError

    def target_logprobs_batch(self, texts: list[list[int]]) -> Iterator[Targets]:
        """Yield the `target_logprobs` of several texts, in order; an engine with batches scores them together."""
        yield from map(self.target_logprobs, texts)

    def logits_of_last_tokens(self, texts: list[list[int]], counts: list[int]) -> Iterator[tuple[int, Any]]:
        """Yield the logits of the last `counts[i]` positions of each text i: its number, with chunks [positions, vocab]
        as `logits` yields them, in order. An engine with batches runs several texts at once."""
        for number, (ids, count) in enumerate(zip(texts, counts, strict=True)):
            before = len(ids) - count
            for chunk in self.logits(ids):
                rows = chunk[max(before, 0) :]
                before -= len(chunk)
                if len(rows):
                    yield number, rows

    def allow_eos(self) -> bool:
        """Let `decode` choose end-of-sequence tokens from now on, and return whether it can. It may end after one or go
        on; the caller stops at the first."""
        self.may_end = self.can_end
        if self.goes_on:
            self.stop_ids = []
        return self.can_end or self.goes_on

    def processes(self) -> set[int]:
        """Return the ids of the engine's own processes without their children; none where they run on another
        machine."""
        return {os.getpid()}

    def weight_bytes(self) -> int | None:
        """Return the bytes of weights, as loaded, that one decoded token reads (one row of an untied embedding table);
        None where the engine does not report them."""
        return None

    def footprint(self) -> Footprint | None:
        """Return what the weights take, and how keys and values are kept for any number of users and tokens; None where
        it is not known."""
        return None

    def peak_allocated_bytes(self) -> int | None:
        """Return the peak of the GPU memory that the library's allocator handed out; None where it is not reported."""
        return None

    def versions(self) -> dict[str, str]:
        """Return the libraries and kernels in use."""
        return {}

    def close(self) -> None:
        """Free the memory."""


def module(name: str) -> ModuleType:
    """Import the module of engine `name`: the one of that name (`-` as `_`), `attached` for one of its servers, or
    `quantized` for an installed package. Raises `UserError` for any other name."""
    file = name.replace("-", "_")
    if importlib.util.find_spec(f"quantmill.engines.{file}") is None:
        if name in SERVERS:
            file = SERVERS[name].implementation
        elif any(importlib.metadata.Distribution.discover(name=name)):
            file = "quantized"
        else:
            raise UserError(f"engine {name!r}: there is no scripts/quantmill/engines/{file}.py, and no package {name}")
    return importlib.import_module(f"quantmill.engines.{file}")


def find(name: str) -> type[Engine]:
    """Return the class of engine `name`. Raises `UserError` where there is none."""
    base = module(name).Engine
    kind: type[Engine] = type("Engine", (base,), {"__module__": base.__module__})
    kind.name = name
    return kind


def load(
    name: str, artifact: Path, device: str, threads: int, gpus: int = 1, stream: bool = False, **options: Any
) -> Engine:
    """Load `artifact` with engine `name` on `gpus` visible GPUs. `options` may hold the `environment` of a run:
    variables that are set before the engine's libraries are imported. `stream`: block by block, if the engine has this.

    Raises `UserError` for options and GPUs that the engine does not take, and with the artifact's name for whatever
    the engine's libraries raise, now and when it runs.
    """
    with one_line(name, artifact):
        environment = options.pop("environment", {})
        os.environ |= environment
        kind = find(name)
        kind.environment = environment
        check_options(kind, options)
        if stream and "stream" in inspect.signature(kind).parameters:
            options["stream"] = True
        if gpus > 1 and "multi_gpu" not in kind.capabilities:
            raise UserError(f"engine {name} runs on one GPU, and {gpus} are asked for; leave gpus out")
        engine = kind(artifact, device, threads, **options)
    for method in ("decode", "logits", "logits_of_last_tokens", "target_logprobs_batch"):
        setattr(engine, method, _guard_iterator(getattr(engine, method), name, artifact))
    for method in ("target_logprobs", "processes", "weight_bytes", "footprint", "peak_allocated_bytes", "versions"):
        setattr(engine, method, one_line(name, artifact)(getattr(engine, method)))
    return engine


def check_options(kind: type[Engine], options: Mapping[str, Any]) -> None:
    """Raise `UserError` for an option that `kind.__init__` does not take, or of another type. A class that takes any
    (`**options`) checks them itself."""
    parameters = list(inspect.signature(kind).parameters.values())[3:]  # after artifact, device and threads
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    hints = typing.get_type_hints(kind.__init__)
    for option, value in options.items():
        check_name(kind.name, option, [each.name for each in parameters])
        kinds = typing.get_args(hints[option]) or (hints[option],)
        if Any not in kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise UserError(f"engine {kind.name}: option {option} is {value!r}; it must be of type {kinds[0].__name__}")


def check_name(engine: str, option: str, known: Collection[str]) -> None:
    """Raise `UserError` for an option that is not a known one."""
    if option not in known:
        raise UserError(f"engine {engine}: unknown option {option!r}{suggestion(option, known)}")


def add_arguments(arguments: argparse.ArgumentParser) -> None:
    """Add the arguments of programs that run an engine."""
    arguments.add_argument("--engine", required=True, help="the engine's name")
    arguments.add_argument("--options", type=parse_options, default={}, help="JSON, in the engine's own words")
    arguments.add_argument("--gpus", type=int, default=1, help="GPUs that it runs on")
    devices.add_arguments(arguments)


def parse_options(text: str) -> dict[str, Any]:
    """Parse an engine's options. Raises `UserError` unless they are a JSON object."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise UserError(f"--options {text!r} is not JSON ({error})") from None
    if not isinstance(options, dict):
        raise UserError(f'--options {text!r} is not a mapping; write {{"name": value}}')
    return options


@contextmanager
def one_line(name: str, artifact: Path) -> Iterator[None]:
    """Raise whatever an engine raises as a `UserError`. Its cause is kept where Quantmill's own code raised it, and the
    log then shows the traceback: that may be a bug here, whereas a library's error is about the artifact."""
    try:
        yield
    except (UserError, OSError, MemoryError):  # a line of their own
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = Path(last.filename)
        ours = place.is_relative_to(PACKAGE)
        said = f"{type(error).__name__}: {first_line(error)}; {place.name} line {last.lineno}"
        raise UserError(f"{artifact}: {name} fails on it ({said})") from (error if ours else None)


def _guard_iterator(call: Callable[..., Iterator[Any]], name: str, artifact: Path) -> Callable[..., Iterator[Any]]:
    """Return an engine's generator method, whose failures become one line."""

    def run(*inputs: Any) -> Iterator[Any]:
        with one_line(name, artifact):
            yield from call(*inputs)

    return run


def other_dtype(name: str, device: str) -> str | None:
    """Return the other dtype that engine `name` can calculate in, for the noise floor; None where there is none.

    Such an engine's module has a table OTHER_DTYPES (device -> dtype), and an option `dtype`.
    """
    return getattr(module(name), "OTHER_DTYPES", {}).get(device)


def chunk_positions(vocab_size: int, device: str = "cpu") -> int:
    """Return the positions in one chunk of logits, at least 16."""
    values = cuda.total_bytes() // CHUNK_SHARE if device == "cuda" else CHUNK_LOGITS
    return min(CHUNK_POSITIONS[device], max(16, values // vocab_size))
