"""Torch zips that lie: nothing runs, memory stays small, and one line names the file."""

import collections
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from forge import tensor_pickle, zip_with

from quantmill.checkpoint import torch_zip
from quantmill.common.program import UserError


def test_a_hand_made_bin_reads(tmp_path: Path) -> None:
    storage = np.arange(4, dtype="<f4").tobytes()
    path = zip_with(tmp_path / "good.bin", tensor_pickle(1, (3,), (1,)), storage)
    tensor = torch_zip.read(path)["weight"]
    assert b"".join(bytes(chunk) for chunk in tensor.chunks()) == storage[4:]


@pytest.mark.parametrize(
    ("offset", "shape", "stride", "message"),
    [
        (1, (4,), (1,), "reaches beyond its storage"),
        (0, (2, 2), (3, 1), "reaches beyond its storage"),
        (0, (2**62,), (2**62,), "reaches beyond its storage"),
        (0, (-1,), (1,), "impossible shape"),
        (-1, (2,), (1,), "impossible shape"),
        (0, (2,), (1, 1), "impossible shape"),
        (0, ("2",), (1,), "impossible shape"),
    ],
)
def test_views_that_lie_are_refused(tmp_path: Path, offset: int, shape: tuple, stride: tuple, message: str) -> None:
    path = zip_with(tmp_path / "lie.bin", tensor_pickle(offset, shape, stride))
    with pytest.raises(UserError, match=message):
        torch_zip.read(path)


@pytest.mark.parametrize(
    "pickled",
    [
        pickle.PROTO + b"\x02" + pickle.EMPTY_TUPLE + pickle.TUPLE1 * 100_000 + pickle.STOP,
        pickle.PROTO + b"\x02" + pickle.EMPTY_LIST * 5 + pickle.APPEND * 10 + pickle.STOP,
        pickle.PROTO + b"\x05" + pickle.BYTEARRAY8 + struct.pack("<Q", 2**40) + pickle.STOP,
        pickle.PROTO
        + b"\x02"
        + pickle.GLOBAL
        + b"torch\nHalfStorage\n"
        + pickle.EMPTY_DICT
        + pickle.BUILD
        + pickle.STOP,
        pickle.PROTO + b"\x02" + pickle.LONG_BINGET + b"\xff\xff\xff\xff" + pickle.STOP,
        pickle.PROTO + b"\x02" + pickle.BINUNICODE + b"\xff\xff\xff\xff" + b"short",
        b"",
    ],
    ids=["deep tuples", "empty stack", "huge bytearray", "build a type", "memo", "long text", "empty"],
)
def test_pickles_that_would_crash_are_refused(tmp_path: Path, pickled: bytes) -> None:
    with pytest.raises(UserError, match=r"its data\.pkl is damaged"):
        torch_zip.read(zip_with(tmp_path / "x.bin", pickled))


def test_deep_lists_end_in_one_line(tmp_path: Path) -> None:
    nested = pickle.PROTO + b"\x02" + pickle.EMPTY_LIST * 100_000 + pickle.APPEND * 99_999 + pickle.STOP
    with pytest.raises(UserError, match="holds a list, not a state_dict"):
        torch_zip.read(zip_with(tmp_path / "x.bin", nested))


def test_the_attributes_of_a_state_dict_are_dropped(tmp_path: Path) -> None:
    state = collections.OrderedDict()
    state._metadata = collections.OrderedDict(version=1)  # what torch.nn.Module.state_dict adds
    assert torch_zip.read(zip_with(tmp_path / "x.bin", pickle.dumps(state, protocol=2))) == {}


def test_a_view_that_expands_to_terabytes_is_refused(tmp_path: Path) -> None:
    path = zip_with(tmp_path / "x.bin", tensor_pickle(0, (2**40,), (0,)))
    with pytest.raises(UserError, match="its tensors repeat its bytes more than 64 times"):
        torch_zip.read(path)
