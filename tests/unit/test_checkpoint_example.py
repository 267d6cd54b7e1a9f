"""A checkpoint of format version 1 that lies in tests/data for ever: every later release must read it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import hyperstate as hs
from hyperstate_numpy.kit import Kit

PATH = Path(__file__).parents[1] / "data" / "checkpoint-1"
MATRIX = [[float(3 * i + j) for j in range(3)] for i in range(5)]


def test_it_is_whole():
    report = hs.verify(PATH)
    assert ("0bac8697892f4300bd0b73b6b73ba6c5", 4, 6) == (report.id, report.files, report.tensors)
    assert 8 + 60 + 3 + 4 + 4 + 120 == report.nbytes


def test_its_files_hold_the_numbers_where_docs_format_says():
    found: dict[str, Any] = {}
    for file in sorted(PATH.glob("*/*.safetensors")):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        offsets = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                code = {"F32": "f", "F64": "d", "I64": "q", "BF16": "H", "BOOL": "?"}[entry["dtype"]]
                body = data[8 + length + start : 8 + length + stop]
                numbers = struct.unpack(f"<{len(body) // struct.calcsize(code)}{code}", body)
                found[name, tuple(offsets[name]["saved_offsets"])] = numbers
    rows = [number for row in MATRIX for number in row]
    assert {
        ("count", ()): (7,),
        ("scale", ()): (0.25,),
        ("mask", (0,)): (True, False, True),
        ("small", (0, 0)): (0x3FC0, 0xC000),
        ("dense.weight", (0, 0)): tuple(rows[:9]),
        ("dense.weight", (3, 0)): tuple(rows[9:]),
        ("state.dense.weight.moment", (0, 0)): tuple(-x for x in rows[:9]),
        ("state.dense.weight.moment", (3, 0)): tuple(-x for x in rows[9:]),
    } == found


def test_it_loads_with_everything_that_was_saved():
    kit = Kit()
    model = kit.with_parameters(
        {
            "dense.weight": kit.tensor([[0.0] * 3] * 5),
            "scale": kit.tensor(0.0),
            "small": kit.tensor([[0.0], [0.0]], "bfloat16"),
            "mask": kit.tensor([False] * 3, "bool"),
        }
    )
    kit.add_buffer(model, "count", kit.tensor(0, "int64"))
    optimizer = kit.optimizer(model, "custom", groups=[(["scale", "dense.weight"], {}), (["small"], {"own": 1})])
    options = hs.StateDictOptions(strict=False)  # the groups of the target cut across those of the checkpoint
    loaded = hs.load(PATH, model, optimizer, options=options)
    named = kit.named(model)
    assert (MATRIX, 0.25, 7) == (named["dense.weight"].tolist(), named["scale"].tolist(), named["count"].tolist())
    assert ([[1.5], [-2.0]], [True, False, True]) == (named["small"].tolist(), named["mask"].tolist())
    state = kit.state(optimizer, named["dense.weight"])
    assert [[-x for x in row] for row in MATRIX] == state["moment"].tolist()
    assert ("float64", 3.0, "float32") == (state["moment"].dtype, state["step"].tolist(), state["step"].dtype)
    assert repr({"pair": (1, [True, None]), 4: "four"}) == repr(state["odd"])
    assert {0: {"rank": 0, "step": (12, 1 << 70)}, 1: {"rank": 1, "step": (12, 1 << 70)}} == loaded.extras
    assert 0 == loaded.extra["rank"]
    groups = kit.groups(optimizer)
    assert (0.125, None, 1) == (groups[1]["lr"], groups[1]["note"], groups[1]["own"])
    assert (0.125, (0.5, 0.75)) == (groups[0]["lr"], groups[0]["betas"])
